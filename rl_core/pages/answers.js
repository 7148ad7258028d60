// The page: the answers that are left, those of them that are on the screen, and a group of them in full.

const HEIGHTS = { answers: [84, 152], groups: [270, 430] }; // pixels of an entry: all answers are short, or not
const SHORT = 60; // tokens
const PREVIEW = { answers: 900, groups: 6000, whole: 30000 }; // characters of an answer, until all of it is asked for
const BEYOND = 2; // entries above and below the screen that are made, too

let page, asked, entries = [], colours, shownNodes = new Map();

function choose() {
  const chosen = [];
  for (let answer = 0; answer < page.count; answer++) if (matches(answer)) chosen.push(answer);
  if (SORTS[asked.sort][1]) chosen.sort(SORTS[asked.sort][1]);
  const groups = new Map(); // in the order of their first answer
  for (const answer of chosen) {
    const group = page.answers.group[answer];
    groups.set(group, [...(groups.get(group) || []), answer]);
  }
  entries = asked.layout === "answers" ? chosen : [...groups];
  say(chosen, groups.size);
  byId("list").scrollTop = 0;
  redraw(true);
}

function say(chosen, groups) {
  const mean = (values) => {
    const known = chosen.map((answer) => values[answer]).filter((value) => !Number.isNaN(value));
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
  };
  const parts = Object.entries(page.parts).map(([name, values]) => `, ${name} ${number(mean(values))}`).join("");
  const means = chosen.length ? `: mean reward ${number(mean(page.answers.reward))}${parts}, `
    + `right ${number(mean(page.answers.correct))}, length ${number(mean(page.answers.length), 1)}` : "";
  const left = `${chosen.length} of ${page.count} answers, ${groups} of ${page.groups.id.length} groups`;
  byId("count").textContent = left + means;
}

function entryNode(entry) {
  const limit = PREVIEW[asked.layout];
  if (asked.layout === "answers") {
    const node = card(entry, limit), group = page.answers.group[entry];
    node.prepend(groupHead(group, null));
    return make("section", { class: "entry" }, node);
  }
  const [group, answers] = entry;
  return make("section", { class: "entry", "data-group": group }, groupHead(group, answers),
    make("div", { class: "prompt" }, promptOf(page, group)),
    make("div", { class: "beside" }, ...answers.map((answer) => card(answer, limit))));
}

function redraw(anew) {
  const list = byId("list"), height = HEIGHTS[asked.layout][page.longest > SHORT ? 1 : 0];
  if (anew) { // what was scrolled to stays where it is
    shownNodes.forEach((node) => node.remove());
    shownNodes = new Map();
    list.firstChild.style.height = `${entries.length * height}px`;
  }
  const first = Math.max(0, Math.floor(list.scrollTop / height) - BEYOND);
  const last = Math.min(entries.length, Math.ceil((list.scrollTop + list.clientHeight) / height) + BEYOND);
  for (const [at, node] of shownNodes) {
    if (at < first || at >= last) {
      node.remove();
      shownNodes.delete(at);
    }
  }
  for (let at = first; at < last; at++) {
    if (shownNodes.has(at)) continue;
    const node = entryNode(entries[at]);
    node.style.top = `${at * height}px`;
    node.style.height = `${height - 8}px`;
    shownNodes.set(at, node);
    list.firstChild.append(node);
  }
}

function legend() {
  const [, , meaning] = MODES.find(([mode]) => mode === asked.colour), why = page.absent[asked.colour];
  return [why ? `${meaning}: ${why}` : meaning, ...colours.legend.map(([colour, text]) => {
    const swatch = make("span", { class: "swatch" }, text);
    swatch.style.backgroundColor = colour;
    return swatch;
  })];
}

function recolour() {
  colours = colouring(page, asked.colour);
  byId("legend").replaceChildren(...legend());
  redraw(true);
  if (byId("one").open) openGroup(Number(byId("one").dataset.group));
}

function openGroup(group) {
  const dialog = byId("one"), close = make("button", { type: "button", class: "close" }, "close");
  close.addEventListener("click", () => dialog.close());
  const there = MODES.filter(([mode]) => !page.absent[mode]);
  const picked = make("select", { "aria-label": "colour by" }, ...there.map(([mode, name]) =>
    make("option", { value: mode, selected: mode === asked.colour }, name)));
  picked.addEventListener("change", () => {
    asked.colour = byId("tools").elements.colour.value = picked.value;
    recolour();
  });
  dialog.dataset.group = group;
  dialog.replaceChildren(make("div", { class: "bar" }, picked, make("span", {}, ...legend()), close), groupHead(group, page.members[group]),
    make("div", { class: "prompt" }, promptOf(page, group)),
    make("div", { class: "beside" }, ...page.members[group].map((answer) => card(answer, PREVIEW.whole))));
  if (!dialog.open) dialog.showModal();
}

function tip(event) {
  const node = event.target.closest ? event.target.closest("[data-token]") : null, box = byId("tip");
  box.hidden = !node;
  if (!node) return;
  const answer = Number(node.closest("[data-answer]").dataset.answer);
  box.textContent = tokenLines(page, answer, Number(node.dataset.token), node.textContent).join("\n");
  (node.closest("dialog") || document.body).append(box); // an open dialog lies above everything else
  box.style.left = `${Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 8)}px`;
  const below = event.clientY + 18, above = event.clientY - box.offsetHeight - 10;
  box.style.top = `${below + box.offsetHeight > innerHeight ? above : below}px`;
}

async function open() {
  page = await readPage(JSON.parse(byId("data").textContent));
  byId("data").remove(); // the columns have it now
  const first = ["advantage", "logprob"].find((mode) => page.hasTokens && !page.absent[mode]);
  asked = { ...FRESH, colour: first || "none" };
  tools();
  byId("list").append(make("div", { class: "all" }));
  colours = colouring(page, asked.colour);
  byId("legend").replaceChildren(...legend());
  choose();
  let drawing = 0;
  const later = () => { drawing = drawing || requestAnimationFrame(() => { drawing = 0; redraw(false); }); };
  byId("list").addEventListener("scroll", later);
  addEventListener("resize", later);
  document.addEventListener("mousemove", tip);
  document.addEventListener("click", (event) => {
    const node = event.target.closest("[data-open]");
    if (node) openGroup(Number(node.dataset.open));
  });
  requestAnimationFrame(() => setTimeout(() => { // behind the frame that shows them
    performance.mark("answers shown");
    document.body.dataset.ready = "";
  }));
}

open().catch((error) => {
  byId("count").textContent = `This page could not be opened: ${error.message}. It needs a browser of 2023 or newer.`;
});
