// One answer: chips with what is recorded of it, and its tokens. Model text is only ever a text node.

const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};
const byId = (id) => document.getElementById(id);
const number = (value, digits = 3) => (Number.isNaN(value) ? "none" : value.toFixed(digits));
const yesNo = (value) => (Number.isNaN(value) ? "not known" : value > 0.5 ? "right" : "wrong");

function chips(answer) {
  const { answers } = page, group = answers.group[answer], versions = versionsOf(page, answer);
  const line = make("div", { class: "chips" });
  const chip = (text, kind = "") => line.append(make("span", { class: `chip ${kind}` }, text));
  chip(`reward ${number(answers.reward[answer])}`, "reward");
  for (const [name, values] of Object.entries(page.parts)) {
    if (!Number.isNaN(values[answer])) chip(`${name} ${number(values[answer])}`, "part");
  }
  const verdict = yesNo(answers.correct[answer]);
  chip(verdict, verdict.replace(" ", "-"));
  chip(`${answers.length[answer]} tokens`);
  chip(answers.finish[answer], answers.finish[answer] === "length" ? "cut" : "");
  if (answers.mode[answer]) chip(answers.mode[answer]);
  const ends = versions.length > 2 ? [versions[0], "...", versions[versions.length - 1]] : versions;
  chip(ends.map((v) => (v === "..." ? v : `v${v}`)).join(" "));
  if (page.groups.age[group] !== null) chip(`age ${page.groups.age[group]}`);
  if (answers.extracted[answer] !== null) chip(`read as ${JSON.stringify(answers.extracted[answer])}`, "extracted");
  return line;
}

// Tokens as spans, or the text alone where its tokens are not known. Model text is only ever a text node.
function words(answer, limit) {
  const box = make("div", { class: "words" });
  if (!page.hasTokens) {
    const text = page.answers.text[answer] || "";
    box.append(text.slice(0, limit), text.length > limit ? more(answer, box) : "");
    return box;
  }
  const places = placesOf(page, answer), hits = hitsOf(answer);
  let characters = 0;
  const pieces = piecesOf(page, places.length > limit ? places.subarray(0, limit) : places);
  for (let offset = 0; offset < pieces.length; offset++) {
    if (characters > limit) break;
    characters += pieces[offset].length;
    box.append(token(answer, offset, pieces[offset], hits(characters - pieces[offset].length, characters)));
  }
  if (box.childNodes.length < places.length) box.append(more(answer, box));
  return box;
}

function token(answer, offset, piece, hit) {
  const special = page.special.has(page.tokens.place[page.firstToken[answer] + offset]);
  const kind = [special ? "special" : "", hit ? "hit" : "", piece ? "" : "piece"].join(" ").trim();
  const node = make("span", { "data-token": offset, class: kind || null }, piece);
  const colour = colours.colour(answer, offset);
  if (colour) node.style.backgroundColor = colour;
  return node;
}

function hitsOf(answer) {
  const wanted = asked.search.toLowerCase(), ranges = [];
  const text = wanted ? textOf(page, answer).toLowerCase() : "";
  for (let at = text.indexOf(wanted); wanted && at >= 0; at = text.indexOf(wanted, at + wanted.length)) ranges.push(at);
  let next = 0; // tokens are asked for in order
  return (begin, end) => {
    while (next < ranges.length && ranges[next] + wanted.length <= begin) next++;
    return next < ranges.length && ranges[next] < end;
  };
}

function more(answer, box) {
  const button = make("button", { type: "button", class: "more" }, "all of it");
  button.addEventListener("click", (event) => {
    event.stopPropagation();
    box.replaceWith(words(answer, Infinity));
  });
  return button;
}

function card(answer, limit) {
  return make("article", { "data-answer": answer, class: "answer" }, chips(answer), words(answer, limit));
}

function groupHead(group, answers) {
  const name = make("button", { type: "button", class: "name", "data-open": group, title: "the whole group" },
    page.groups.id[group]);
  const truth = page.groups.truth[group];
  return make("div", { class: "head" }, name, ` ${page.groups.source[group]} `,
    answers === null ? "" : `${answers.length} of ${page.members[group].length} answers`,
    truth === null ? "" : make("span", { class: "truth" }, `truth ${truth}`),
    answers === null ? make("span", { class: "asked" }, promptOf(page, group).slice(0, 300)) : "");
}
