// What is on the page, where it is, and which time is in view.
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas"), pen = canvas.getContext("2d");
const scroller = document.getElementById("scroll"), tip = document.getElementById("tip");
const dark = matchMedia("(prefers-color-scheme: dark)");
const LABELS = 150, AXIS = 34, PART = 22, LANE = 17, GROUP = 9, COUNTER = 46, MANY_GROUPS = 64;
const COLOURS = {
  learn: "#3b74d8", wait: "#c8cdd4", publish: "#d9a514", checkpoint: "#8a5cc9", generate: "#2a9d8f", swap: "#e2711d",
  paused: "#9aa3ad", reward: "#5aa84a", land: "#c2528b", group: "#2a9d8f", validate: "#5661b8", read: "#8bb6e8",
  build: "#5f93dd", update: "#2f5fb3",
};
const DARK = { wait: "#3c434b", paused: "#59626c" };
const TEXT_ON = { wait: "#4a525b", read: "#12253f", land: "#ffffff" };
const versionColour = (v) => `hsl(${(v * 67 + 190) % 360} 52% ${dark.matches ? 46 : 52}%)`;

const lanes = data.lanes.map(readLane);
const groupLanes = lanes.filter((lane) => lane.isGroup).length;
const parts = [];
for (const name of new Set(lanes.map((lane) => lane.part))) {
  const mine = lanes.filter((lane) => lane.part === name), groups = mine.filter((lane) => lane.isGroup);
  parts.push({ name, lanes: mine.filter((lane) => !lane.isGroup), groups, open: groupLanes <= MANY_GROUPS,
    flight: groups.length ? inFlight(groups) : null });
}
const versionKind = data.kinds.indexOf("version"), claimKind = data.kinds.indexOf("claim");
const whole = Math.max(1, data.length_us);
let view = { from: 0, to: whole }, width = 0, height = 0, rows = [], frame = 0, colours = "kind", claims = false;

/** Rows from top to bottom: {top, height, kind, ...}; y counts from below the axis, unscrolled. */
function layOut() {
  rows = [];
  let top = 0;
  const add = (kind, size, more) => { rows.push({ kind, top, height: size, ...more }); top += size; };
  for (const part of parts) {
    add("part", PART, { part });
    for (const lane of part.lanes) add("lane", LANE, { lane, part });
    if (part.flight) add("flight", COUNTER, { part, flight: part.flight });
    if (part.open) for (const lane of part.groups) add("lane", GROUP, { lane, part });
  }
  if (data.counters.length) add("part", PART, { part: { name: "metrics" } });
  for (const counter of data.counters) add("counter", COUNTER, { counter });
  document.getElementById("tall").style.height = `${top + AXIS + 4}px`;
}
const scale = () => (width - LABELS) / (view.to - view.from);
const xOf = (us) => LABELS + (us - view.from) * scale();
const usOf = (x) => view.from + (x - LABELS) / scale();
const rowAt = (y) => {
  const inside = y - AXIS + scroller.scrollTop;
  return y < AXIS ? undefined : rows.find((row) => inside >= row.top && inside < row.top + row.height);
};

function look(from, to) {
  const span = Math.min(whole * 1.02, Math.max(20, to - from));
  const first = Math.max(-whole * 0.01, Math.min(from, whole * 1.01 - span));
  view = { from: first, to: first + span };
  redraw();
}
function zoom(factor, x = (width + LABELS) / 2) {
  const at = usOf(x);
  look(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
const pan = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
