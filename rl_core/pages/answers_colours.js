// What a token is coloured by. A number has a side (orange below, blue above 0) and a strength; a name has a colour.

const MODES = [
  ["none", "plain", "no colours"],
  ["advantage", "advantage", "advantage of the token in its step"],
  ["ratio", "ratio", "probability by the policy behind the step / by the proximal policy before it"],
  ["gap", "log-prob gap", "log-prob by the learner before the step, minus that of sampling (behavior), nats"],
  ["logprob", "log-prob", "log-prob of the distribution that was sampled (behavior), nats"],
  ["version", "version", "weight version that sampled the token"],
  ["mask", "mask", "whether the token is in the loss"],
];
const STRONGEST = 0.62; // opacity: text stays readable on it, in both schemes
const HUES = [212, 32, 140, 280, 0, 180, 60, 320];
const STATE_COLOURS = [
  "rgba(128,128,128,0.45)", "rgba(40,150,90,0.35)", "rgba(225,110,20,0.5)", "rgba(200,60,140,0.45)",
];
const SAMPLE = 20000; // tokens that a scale is taken from

const signed = (share) => {
  const strength = (Math.min(1, Math.abs(share)) * STRONGEST).toFixed(3);
  return share < 0 ? `rgba(226,112,22,${strength})` : `rgba(36,112,220,${strength})`;
};

// The size of a strong number: 95 of 100 are no larger.
function scaleOf(page, mode) {
  const step = Math.max(1, Math.floor(page.tokens.place.length / SAMPLE)), sizes = [];
  for (let at = 0; at < page.tokens.place.length; at += step) {
    const size = Math.abs(NUMBERS[mode](page, at));
    if (size > 0) sizes.push(size);
  }
  sizes.sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(0.95 * (sizes.length - 1))] : 1;
}

function versionsIn(page) {
  return [...new Set(page.runs.version)].sort((a, b) => a - b);
}

// A function (answer, offset) -> colour, or "" for none; and what the legend says.
function colouring(page, mode) {
  if (mode === "none" || page.absent[mode]) return { colour: () => "", legend: [] };
  if (mode === "version") {
    const order = versionsIn(page);
    const hue = new Map(order.map((v, i) => [v, `hsla(${HUES[i % HUES.length]},70%,50%,0.38)`]));
    const shown = order.length > 12 ? [...order.slice(0, 6), null, ...order.slice(-5)] : order;
    return {
      colour: (answer, offset) => hue.get(versionOf(page, answer, offset)),
      legend: shown.map((v) => (v === null ? ["", "..."] : [hue.get(v), `v${v}`])),
    };
  }
  if (mode === "mask") {
    const there = STATES.map((_, state) => page.tokens.state.includes(state));
    return {
      colour: (answer, offset) => STATE_COLOURS[page.tokens.state[page.firstToken[answer] + offset]],
      legend: STATES.map((name, state) => [STATE_COLOURS[state], name]).filter((_, state) => there[state]),
    };
  }
  const scale = scaleOf(page, mode), number = NUMBERS[mode], shown = mode === "ratio" ? Math.exp : (x) => x;
  const ends = mode === "logprob" ? [-scale, 0] : [-scale, 0, scale];
  return {
    colour: (answer, offset) => {
      const value = number(page, page.firstToken[answer] + offset);
      return value ? signed(value / scale) : ""; // neither NaN nor 0 has a side
    },
    legend: ends.map((end) => [end ? signed(end / scale) : "transparent", short(shown(end))]),
  };
}

const short = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(3))) : "none");

// What is known of one token, a line each.
function tokenLines(page, answer, offset, piece) {
  const at = page.firstToken[answer] + offset, place = page.tokens.place[at];
  const lines = [`${JSON.stringify(piece)}  id ${page.ids[place]}${page.special.has(place) ? " (special)" : ""}`,
    `token ${offset + 1} of ${page.answers.length[answer]}`];
  for (const [mode, name] of MODES) {
    if (!(mode in NUMBERS) || page.absent[mode]) continue;
    const value = NUMBERS[mode](page, at);
    const shown = mode === "ratio" ? Math.exp(value) : value;
    lines.push(`${name} ${Number.isNaN(value) ? "none" : shown.toFixed(3)}`);
  }
  if (!page.absent.version) lines.push(`version ${versionOf(page, answer, offset)}`);
  if (!page.absent.mask) lines.push(STATES[page.tokens.state[at]]);
  return lines;
}
