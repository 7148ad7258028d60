"use strict";
// Numbers of the page to typed arrays, and what is asked of them. Nothing here draws.

/** A lane's flat list, five numbers a bar, as arrays: begin and end (microseconds since the first), name, of, text. */
function readLane(lane) {
  const flat = lane.bars, count = flat.length / 5;
  const bars = { count, begin: new Float64Array(count), end: new Float64Array(count), name: new Uint16Array(count),
    of: new Int32Array(count), text: new Int32Array(count) };
  let at = 0;
  for (let i = 0, k = 0; i < count; i++, k += 5) {
    bars.begin[i] = at += flat[k];
    bars.end[i] = at += flat[k + 1];
    bars.name[i] = flat[k + 2];
    bars.of[i] = flat[k + 3];
    bars.text[i] = flat[k + 4];
  }
  return { part: lane.part, name: lane.name, isGroup: lane.name.startsWith("groups "), bars };
}

/** The first place in an ascending array from `from` on whose value is over `limit`; its length where none is. */
function firstOver(values, limit, from = 0) {
  let low = from, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

/** How many groups of these lanes are in flight, as steps: at[i] <= time < at[i + 1] has counts[i]. */
function inFlight(lanes) {
  let size = 0;
  for (const lane of lanes) size += lane.bars.count;
  const begins = new Float64Array(size), ends = new Float64Array(size);
  let n = 0;
  for (const { bars } of lanes) {
    for (let i = 0; i < bars.count; i++) {
      const joined = i > 0 && bars.begin[i] === bars.end[i - 1] && bars.text[i] === bars.text[i - 1];
      if (joined) ends[n - 1] = bars.end[i]; // a group's reward stands behind its answers
      else { begins[n] = bars.begin[i]; ends[n++] = bars.end[i]; }
    }
  }
  const starts = begins.subarray(0, n).sort(), stops = ends.subarray(0, n).sort();
  const at = [], counts = [];
  let most = 0, now = 0;
  for (let i = 0, j = 0; j < n;) {
    const time = i < n && starts[i] < stops[j] ? starts[i] : stops[j];
    while (i < n && starts[i] === time) { i++; now++; }
    while (j < n && stops[j] === time) { j++; now--; }
    most = Math.max(most, now);
    at.push(time);
    counts.push(now);
  }
  return { at: Float64Array.from(at), counts: Uint32Array.from(counts), most };
}

/** Microseconds as people say them: "812 µs", "12.4 ms", "3.21 s", "2 h 5 min". */
function duration(us) {
  if (us < 1e3) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${(us / 1e3).toPrecision(3)} ms`;
  if (us < 6e7) return `${(us / 1e6).toPrecision(3)} s`;
  const minutes = Math.round(us / 6e7);
  if (minutes < 60) return `${(us / 6e7).toFixed(1)} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Distance of ticks (microseconds) that gives at most `most` of them over `span`. */
function tickStep(span, most) {
  const rough = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 5, 10].find((each) => each * power >= rough);
  return Math.max(1, factor * power);
}

/** Seconds since the first moment, with as many decimals as a step of ticks asks for. */
function seconds(us, step) {
  return (us / 1e6).toFixed(Math.min(6, Math.max(0, -Math.floor(Math.log10(step / 1e6) + 1e-9))));
}
