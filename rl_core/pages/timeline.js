// What a pointer is told, what people do, and the first look.

/** The bar at a place of the canvas, or null; a bar under a pixel wide is found within two pixels. */
function barAt(x, y) {
  const row = rowAt(y);
  if (!row || row.kind !== "lane" || x < LABELS) return null;
  const { bars } = row.lane, i = firstOver(bars.end, usOf(x - 1));
  return i < bars.count && bars.begin[i] <= usOf(x + 1) ? { row, i } : null;
}
function wordsAt(x, y) {
  const hit = barAt(x, y), row = rowAt(y);
  if (hit) {
    const { lane } = hit.row, { bars } = lane, { i } = hit, us = bars.end[i] - bars.begin[i];
    const about = data.texts[bars.text[i]];
    return `${lane.part}, ${lane.name}: ${data.names[bars.name[i]]}\n${duration(us)}, from `
      + `${seconds(bars.begin[i], 1e2)} s to ${seconds(bars.end[i], 1e2)} s${about ? `\n${about}` : ""}`;
  }
  if (row && row.kind === "counter") {
    const { at, values, name, unit } = row.counter, i = Math.max(0, firstOver(at, usOf(x)) - 1);
    return `${name}\n${values[i]} ${unit} at ${seconds(at[i], 1e3)} s`;
  }
  if (row && row.kind === "flight") {
    const i = firstOver(row.flight.at, usOf(x)) - 1;
    return i < 0 ? "" : `${row.part.name}\n${row.flight.counts[i]} groups in flight`;
  }
  const near = data.marks.find(([kind, at]) => (kind !== claimKind || claims) && Math.abs(xOf(at) - x) < 3);
  return near ? `${near[3]}\nat ${seconds(near[1], 1e2)} s` : "";
}
function point(event) {
  const words = event && wordsAt(event.offsetX, event.offsetY);
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
}

// -- what people do

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  drag = { x: event.offsetX, y: event.clientY, top: scroller.scrollTop, view, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return point(event);
  const by = event.offsetX - drag.x;
  if (Math.abs(by) + Math.abs(event.clientY - drag.y) > 3) drag.moved = true;
  if (!drag.moved) return;
  tip.hidden = true;
  canvas.classList.add("dragged");
  const us = by / scale();
  scroller.scrollTop = drag.top - (event.clientY - drag.y);
  look(drag.view.from - us, drag.view.to - us);
});
canvas.addEventListener("pointerup", (event) => {
  const row = rowAt(event.offsetY);
  if (drag && !drag.moved && row && row.kind === "flight") {
    row.part.open = !row.part.open;
    layOut();
    redraw();
  }
  drag = null;
  canvas.classList.remove("dragged");
});
canvas.addEventListener("pointercancel", () => { drag = null; });
canvas.addEventListener("pointerleave", () => point(null));
canvas.addEventListener("dblclick", (event) => {
  const hit = barAt(event.offsetX, event.offsetY);
  if (!hit) return zoom(0.5, event.offsetX);
  const { bars } = hit.row.lane, us = bars.end[hit.i] - bars.begin[hit.i];
  look(bars.begin[hit.i] - us * 0.1, bars.end[hit.i] + us * 0.1);
});
canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), event.offsetX);
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / (width - LABELS));
  }
  point(null);
}, { passive: false });
const nearer = () => zoom(0.7), farther = () => zoom(1 / 0.7), sooner = () => pan(-0.15), later = () => pan(0.15);
const KEYS = { w: nearer, s: farther, a: sooner, d: later, "+": nearer, "-": farther, ArrowLeft: sooner,
  ArrowRight: later, 0: () => look(0, whole) };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("select, input")) return;
  const act = KEYS[event.key];
  if (act) { event.preventDefault(); act(); }
});
document.getElementById("fit").addEventListener("click", () => look(0, whole));
document.getElementById("nearer").addEventListener("click", () => zoom(0.5));
document.getElementById("farther").addEventListener("click", () => zoom(2));
document.getElementById("colours").addEventListener("change", (event) => { colours = event.target.value; redraw(); });
document.getElementById("claims").addEventListener("change", (event) => { claims = event.target.checked; redraw(); });
scroller.addEventListener("scroll", redraw);
new ResizeObserver(redraw).observe(scroller);
dark.addEventListener("change", () => { readPaints(); legend(); redraw(); });

function legend() {
  const place = document.getElementById("legend");
  place.replaceChildren(...data.names.map((name) => {
    const item = document.createElement("span"), square = document.createElement("i");
    square.style.background = (dark.matches && DARK[name]) || COLOURS[name] || "#7d8790";
    item.append(square, name);
    return item;
  }));
}
const count = lanes.reduce((sum, lane) => sum + lane.bars.count, 0);
document.getElementById("facts").textContent = lanes.length
  ? `${duration(whole)} from ${new Date(data.begin_us / 1000).toISOString().replace("T", " ").slice(0, 19)} UTC, `
    + `${count.toLocaleString("en")} spans in ${lanes.length} lanes`
  : "Nothing of this run says yet when it was.";
readPaints();
legend();
layOut();
const working = lanes.map(({ bars }) => {
  for (let i = 0; i < bars.count; i++) if (data.names[bars.name[i]] !== "wait") return bars.begin[i];
  return whole;
});
const firstWork = Math.min(whole, ...working);
look(firstWork < whole ? Math.max(0, firstWork - (whole - firstWork) * 0.02) : 0, whole); // behind the start-up
requestAnimationFrame(() => requestAnimationFrame(() => {
  performance.mark("timeline drawn");
  document.body.dataset.ready = "";
}));
