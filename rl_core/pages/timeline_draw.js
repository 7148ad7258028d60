// Everything that is drawn, from what timeline_layout.js says.

const paint = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let ink, muted, line, paper, panel;
function readPaints() {
  [ink, muted, line, paper, panel] = ["--ink", "--muted", "--line", "--paper", "--panel"].map(paint);
}
function colourOf(lane, i) {
  const name = data.names[lane.bars.name[i]];
  const version = lane.bars.of[i];
  if (colours === "version" && version >= 0 && (name === "generate" || name === "group" || name === "swap"
      || name === "reward" || name === "publish" || name === "validate")) return versionColour(version);
  return (dark.matches && DARK[name]) || COLOURS[name] || "#7d8790";
}

function redraw() {
  if (!frame) frame = requestAnimationFrame(draw);
}
function draw() {
  frame = 0;
  const ratio = devicePixelRatio || 1;
  width = scroller.clientWidth;
  height = scroller.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = paper;
  pen.fillRect(0, 0, width, height);
  pen.textBaseline = "middle";
  const offset = AXIS - scroller.scrollTop;
  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS, width, height - AXIS);
  pen.clip();
  for (const row of rows) {
    const y = row.top + offset;
    if (y > height || y + row.height < AXIS) continue;
    if (row.kind === "part") drawPart(row, y);
    else if (row.kind === "lane") drawLane(row, y);
    else if (row.kind === "flight") drawSteps(row, y);
    else drawCounter(row, y);
  }
  drawMarks();
  pen.restore();
  drawAxis();
  document.getElementById("view").textContent =
    `${seconds(Math.max(0, view.from), 1e3)} s to ${seconds(view.to, 1e3)} s (${duration(view.to - view.from)})`;
  document.documentElement.dataset.from = String(Math.round(view.from));
  document.documentElement.dataset.to = String(Math.round(view.to));
}

function label(words, y, size, colour, x = 8, font = 11) {
  pen.fillStyle = paper;
  pen.fillRect(0, y, LABELS, size);
  pen.fillStyle = colour;
  pen.font = `${font}px system-ui, sans-serif`;
  pen.fillText(words, x, y + size / 2, LABELS - x - 4);
}
function drawPart(row, y) {
  pen.fillStyle = panel;
  pen.fillRect(0, y, width, row.height);
  pen.fillStyle = ink;
  pen.font = "600 12px system-ui, sans-serif";
  pen.fillText(row.part.name, 8, y + row.height / 2);
}

/** Bars of a lane that are in view; of those within one pixel one is drawn, and the next is looked up. */
function drawLane(row, y) {
  const { lane } = row, { bars } = lane, size = row.height - (row.height > 10 ? 3 : 1), per = scale();
  let i = firstOver(bars.end, view.from), drawn = 0;
  pen.font = "10px system-ui, sans-serif";
  while (i < bars.count && bars.begin[i] < view.to) {
    const left = Math.max(LABELS, xOf(bars.begin[i])), right = Math.min(width, xOf(bars.end[i]));
    pen.fillStyle = colourOf(lane, i);
    const wide = Math.max(1, right - left - (right - left > 3 ? 0.5 : 0));
    pen.fillRect(left, y + 1, wide, size);
    if (wide > 26 && size > 10) barText(lane, i, left, wide, y + 1 + size / 2);
    drawn++;
    i = right - left < 1 ? Math.max(i + 1, firstOver(bars.end, view.from + (left + 1 - LABELS) / per, i)) : i + 1;
  }
  if (row.height === GROUP) label("", y, row.height, muted);
  else label(lane.name, y, row.height, muted, 18);
  return drawn;
}
function barText(lane, i, left, wide, y) {
  const name = data.names[lane.bars.name[i]], of = lane.bars.of[i];
  const words = of < 0 ? name : `${name} ${of}`, fits = pen.measureText(words).width < wide - 6;
  pen.fillStyle = (name === "wait" && dark.matches && "#b6bec7") || TEXT_ON[name] || "#ffffff";
  if (fits) pen.fillText(words, left + 3, y);
  else if (wide > 40 && pen.measureText(name).width < wide - 6) pen.fillText(name, left + 3, y);
}

/** Groups in flight as steps; over many of them the largest number of each pixel. */
function drawSteps(row, y) {
  const { at, counts, most } = row.flight, size = row.height - 6, floor = y + row.height - 3;
  pen.fillStyle = dark.matches ? "#2d6d65" : "#9fd2cb";
  let i = Math.max(0, firstOver(at, view.from) - 1);
  for (let x = LABELS; x < width; x++) {
    const until = usOf(x + 1);
    let top = at[i] <= until ? counts[i] : 0;
    while (i + 1 < at.length && at[i + 1] <= until) top = Math.max(top, counts[++i]);
    if (top) pen.fillRect(x, floor - (top / most) * size, 1, (top / most) * size);
  }
  const sign = row.part.open ? "▾" : "▸";
  label(`${sign} groups in flight, most ${most}`, y, row.height, muted, 18);
}
function drawCounter(row, y) {
  const { at, values } = row.counter, size = row.height - 12;
  const low = Math.min(0, ...range(values)), high = Math.max(low, ...range(values));
  const yOf = (value) => y + row.height - 6 - ((value - low) / (high - low || 1)) * size;
  pen.strokeStyle = line;
  pen.strokeRect(LABELS - 0.5, y + 2.5, width - LABELS, row.height - 5);
  pen.beginPath();
  const first = Math.max(0, firstOver(at, view.from) - 1);
  for (let i = first; i < at.length; i++) {
    if (i === first) pen.moveTo(xOf(at[i]), yOf(values[i])); else pen.lineTo(xOf(at[i]), yOf(values[i]));
    if (at[i] > view.to) break;
  }
  pen.strokeStyle = COLOURS.learn;
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.lineWidth = 1;
  label(row.counter.name, y, row.height - 14, ink);
  label(`${low.toPrecision(3)} to ${high.toPrecision(3)} ${row.counter.unit}`, y + row.height - 18, 14, muted, 8, 10);
}
const ranges = new Map();
function range(values) {
  if (!ranges.has(values)) {
    ranges.set(values, [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))]);
  }
  return ranges.get(values);
}

function drawMarks() {
  let before = -Infinity;
  for (const [kind, at] of data.marks) {
    if (kind === claimKind && !claims) continue;
    const x = xOf(at);
    if (x < LABELS || x > width || x - before < 3) continue;
    before = x;
    pen.strokeStyle = kind === versionKind ? "rgba(217, 165, 20, .55)"
      : kind === claimKind ? "rgba(90, 168, 74, .5)" : "rgba(179, 38, 30, .7)";
    pen.beginPath();
    pen.moveTo(Math.round(x) + 0.5, AXIS);
    pen.lineTo(Math.round(x) + 0.5, height);
    pen.stroke();
  }
}
function drawAxis() {
  pen.fillStyle = paper;
  pen.fillRect(0, 0, width, AXIS);
  pen.font = "11px system-ui, sans-serif";
  const step = tickStep(view.to - view.from, (width - LABELS) / 90);
  pen.fillStyle = muted;
  for (let at = Math.ceil(view.from / step) * step; at < view.to; at += step) {
    const x = xOf(at);
    pen.fillRect(x, AXIS - 5, 1, 5);
    pen.fillText(`${seconds(at, step)} s`, x + 3, 9);
  }
  let free = LABELS;
  pen.font = "10px system-ui, sans-serif";
  for (const [kind, at, of] of data.marks) {
    const x = xOf(at);
    if (kind === claimKind || x < free || x > width - 20) continue;
    const words = kind === versionKind ? `v${of}` : `${data.kinds[kind]} ${of}`;
    const [day, night] = kind === versionKind ? ["#8a5a00", "#e0b050"] : ["#b3261e", "#f2877f"];
    pen.fillStyle = dark.matches ? night : day;
    pen.fillText(words, x + 2, 23);
    free = x + pen.measureText(words).width + 8;
  }
  label("seconds", 0, 18, muted);
  label("versions, attempts", 16, 16, muted);
  pen.strokeStyle = line;
  pen.strokeRect(-1, AXIS - 0.5, width + 2, 0);
}
