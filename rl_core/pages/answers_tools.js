// What is asked for: the controls, and which answers that leaves.

const WAIT_MS = 120; // after the last letter of a search
const FRESH = {
  colour: "none", layout: "answers", sort: "order", search: "", correct: "", finish: "", version: "", source: "",
  mode: "", rewardMin: "", rewardMax: "", lengthMin: "", lengthMax: "",
};
function matches(answer) {
  const { answers } = page, reward = answers.reward[answer], length = answers.length[answer];
  const below = (limit, value) => limit !== "" && !(value >= Number(limit));
  const above = (limit, value) => limit !== "" && !(value <= Number(limit));
  return !(below(asked.rewardMin, reward) || above(asked.rewardMax, reward) || below(asked.lengthMin, length)
    || above(asked.lengthMax, length) || (asked.correct && yesNo(answers.correct[answer]) !== asked.correct)
    || (asked.finish && answers.finish[answer] !== asked.finish)
    || (asked.source && page.groups.source[answers.group[answer]] !== asked.source)
    || (asked.mode && answers.mode[answer] !== asked.mode)
    || (asked.version && !versionsOf(page, answer).includes(Number(asked.version)))
    || (asked.search && !searched(page, answer).includes(asked.search.toLowerCase())));
}

const SORTS = {
  order: ["as recorded", null],
  best: ["largest reward", (a, b) => page.answers.reward[b] - page.answers.reward[a]],
  worst: ["smallest reward", (a, b) => page.answers.reward[a] - page.answers.reward[b]],
  longest: ["longest", (a, b) => page.answers.length[b] - page.answers.length[a]],
  shortest: ["shortest", (a, b) => page.answers.length[a] - page.answers.length[b]],
};

function radios(name, label, options, changed) {
  const set = make("fieldset", {}, make("legend", {}, label));
  for (const [value, text, title, why] of options) {
    const input = make("input", { type: "radio", name, value, checked: asked[name] === value });
    input.addEventListener("change", () => { asked[name] = value; changed(); });
    set.append(make("label", { title: why || title || "", class: why ? "absent" : "" }, input, text));
  }
  return set;
}

function select(name, label, options) {
  const input = make("select", { name }, ...options.map(([value, text]) => make("option", { value }, text)));
  input.addEventListener("change", () => { asked[name] = input.value; choose(); });
  return make("label", {}, `${label} `, input);
}

function field(name, label, type, wait = 0) {
  const input = make("input", type === "number" ? { name, type, step: "any" } : { name, type, placeholder: label });
  let timer = 0;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { asked[name] = input.value; choose(); }, wait);
  });
  return make("label", {}, type === "number" ? `${label} ` : "", input);
}

function tools() {
  const distinct = (values) => [...new Set(values)].sort((a, b) => (a < b ? -1 : 1));
  const any = (values) => [["", "any"], ...values.map((value) => [String(value), String(value)])];
  const { answers, groups } = page, versions = versionsIn(page), modes = distinct(answers.mode);
  const form = byId("tools");
  form.replaceChildren(
    radios("colour", "colour by", MODES.map((mode) => [...mode, page.absent[mode[0]]]), recolour),
    radios("layout", "show", [["answers", "answers", "an entry for each"],
      ["groups", "side by side", "the answers of a group beside each other"]], choose),
    make("div", { class: "filters" },
      field("search", "search in answers, prompts, truths", "search", WAIT_MS),
      field("rewardMin", "reward from", "number"), field("rewardMax", "to", "number"),
      field("lengthMin", "tokens from", "number"), field("lengthMax", "to", "number"),
      select("correct", "correct", any(["right", "wrong", "not known"])),
      select("finish", "ended by", any(distinct(answers.finish))),
      versions.length > 1 ? select("version", "version", any(versions)) : "",
      distinct(groups.source).length > 1 ? select("source", "source", any(distinct(groups.source))) : "",
      modes.length > 1 ? select("mode", "asked", any(modes)) : "",
      select("sort", "order", Object.entries(SORTS).map(([name, [text]]) => [name, text])),
      make("button", { type: "reset" }, "reset")));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    asked = { ...FRESH, colour: asked.colour, layout: asked.layout };
    setTimeout(() => { // the form goes back to what it was made with
      form.elements.colour.value = asked.colour;
      form.elements.layout.value = asked.layout;
    });
    choose();
  });
}
