"use strict";
// From the columns of the page to answers, tokens and numbers. Written by rl_core/pages/columns.py.

const ABSENT = -32768; // in a column of thousandths: there is no number
const KINDS = {
  uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  float32: Float32Array,
};
const STATES = ["not sampled by the model", "in the loss", "left the loss by its age", "left the loss: answer cut"];
const IN_LOSS = 1;

async function unpack(column) {
  const text = atob(column.z), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new KINDS[column.kind](await new Response(stream).arrayBuffer());
}

async function unpackAll(columns) {
  const names = Object.keys(columns);
  const packed = (value) => value !== null && typeof value === "object" && "z" in value;
  const read = names.map((name) => (packed(columns[name]) ? unpack(columns[name]) : columns[name]));
  const values = await Promise.all(read);
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}

const starts = (counts) => {
  const begin = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) begin[i + 1] = begin[i] + counts[i];
  return begin;
};

async function readPage(data) {
  const [groups, answers, parts, runs, tokens] = await Promise.all(
    [data.groups, data.answers, data.parts, data.runs, data.tokens].map(unpackAll));
  const hasTokens = tokens.place.length > 0;
  const page = {
    groups, answers, parts, runs, tokens, hasTokens, absent: data.absent, texts: data.texts, ids: data.ids,
    pieces: data.pieces, special: new Set(data.special), count: answers.reward.length,
    firstToken: starts(hasTokens ? answers.length : new Uint32Array(answers.length.length)),
    firstRun: starts(answers.runs), firstPrompt: starts(groups.prompt_tokens), members: groups.id.map(() => []),
    longest: answers.length.reduce((most, length) => Math.max(most, length), 0), lower: new Map(),
  };
  answers.group.forEach((group, answer) => page.members[group].push(answer));
  return page;
}

// The text of each token. Bytes of a character that several tokens share stand at the last of them.
function piecesOf(page, places) {
  let decoder = null;
  return Array.from(places, (place) => {
    const raw = page.pieces[place];
    if (raw === undefined) {
      const left = decoder ? decoder.decode() : "";
      decoder = null;
      return left + page.texts[place];
    }
    decoder = decoder || new TextDecoder();
    return decoder.decode(Uint8Array.from(raw.match(/../g), (pair) => parseInt(pair, 16)), { stream: true });
  });
}

const placesOf = (page, answer) => page.tokens.place.subarray(page.firstToken[answer], page.firstToken[answer + 1]);

function promptOf(page, group) {
  const places = page.groups.prompt_ids.subarray(page.firstPrompt[group], page.firstPrompt[group + 1]);
  return places.length ? piecesOf(page, places).join("") : page.groups.prompt[group];
}

const textOf = (page, answer) =>
  page.hasTokens ? piecesOf(page, placesOf(page, answer)).join("") : page.answers.text[answer] || "";

// What a search looks into, in small letters; made once for each answer.
function searched(page, answer) {
  if (!page.lower.has(answer)) {
    const group = page.answers.group[answer];
    page.lower.set(answer, [textOf(page, answer), promptOf(page, group), page.groups.truth[group] || "",
      page.answers.extracted[answer] || "", page.groups.id[group]].join("\u0000").toLowerCase());
  }
  return page.lower.get(answer);
}

// Weight version of one token of an answer.
function versionOf(page, answer, offset) {
  let run = page.firstRun[answer], end = page.runs.tokens[run];
  while (offset >= end && run + 1 < page.firstRun[answer + 1]) end += page.runs.tokens[++run];
  return page.runs.version[run];
}

const versionsOf = (page, answer) =>
  [...new Set(page.runs.version.subarray(page.firstRun[answer], page.firstRun[answer + 1]))];

const thousandths = (column, at) => (column === undefined || column[at] === ABSENT ? NaN : column[at] / 1000);

// Numbers of a token; NaN where there is none. `at`: its place among the tokens of all answers.
const NUMBERS = {
  advantage: (page, at) => (page.tokens.advantage === undefined ? NaN : page.tokens.advantage[at]),
  ratio: (page, at) => thousandths(page.tokens.policy, at) - thousandths(page.tokens.proximal, at), // its logarithm
  gap: (page, at) => thousandths(page.tokens.proximal, at) - thousandths(page.tokens.behavior, at),
  logprob: (page, at) => thousandths(page.tokens.behavior, at),
};
