// The rollout browser: a run's steps, their groups and samples, with filters and keys.

const MAX_ROWS_SHOWN = 1000;
const filters = {
  text: "",
  domain: "",
  state: "",
  least: "",
  most: "",
  shortest: "",
  longest: "",
  everywhere: false,
};
// What is listed now: run and name, the samples found, and the place of the open one.
const browse = { run: 0, name: null, found: [], open: -1, scan: 0 };

// Samples of a name from a place on: out of the page, or from the server that shows it.
async function loadSamples(runIndex, name, start) {
  const run = data.runs[runIndex];
  if (!data.live) {
    const { samples = [], total = 0 } = run.samples[name] || {};
    return { samples: samples.filter((s) => s.at >= start), next: null, broken: 0, total };
  }
  const query = new URLSearchParams({ run: runIndex, name, start });
  const response = await fetch(`samples?${query}`);
  if (!response.ok)
    throw new Error(`the server said ${response.status}: is the run's folder still there?`);
  const page = await response.json();
  Object.assign(run.texts, page.texts);
  return page;
}

// All samples of a name, page after page.
async function* allSamples(runIndex, name) {
  for (let start = 0; start !== null;) {
    const page = await loadSamples(runIndex, name, start);
    yield page;
    start = page.next;
  }
}

function hasPassed(sample) {
  const inside = (value, low, high) =>
    (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
  const isAnyReward = filters.least === "" && filters.most === "";
  const hasReward =
    typeof sample.reward === "number" && inside(sample.reward, filters.least, filters.most);
  return (
    (isAnyReward || hasReward) &&
    inside(sampledTokens(sample) ?? 0, filters.shortest, filters.longest) &&
    (!filters.domain || String(sample.domain).includes(filters.domain)) &&
    (!filters.state || sample.state === filters.state) &&
    (!filters.text || searchedText(sample).includes(filters.text.toLowerCase()))
  );
}

function searchedText(sample) {
  const { prompt_id, reply, error, why, ground_truth, reason } = sample;
  const said = (sample.transcript || sample.messages || []).map((message) => message.content);
  const texts = [prompt_id, reply, error, why, ground_truth, reason, ...said].filter(
    (text) => text !== null && text !== undefined,
  );
  return texts
    .map((text) => (typeof text === "string" ? text : JSON.stringify(text)))
    .join("\n")
    .toLowerCase();
}

// Not trained on, or worth nothing: what `f` goes to.
const isFailure = (sample) => sample.state !== "done" || !(Number(sample.reward) > 0);

function rolloutsView(runIndex = 0, name = null, at = null) {
  const index = Number(runIndex),
    run = data.runs[index];
  if (!run) return [el("p", {}, "There is no such run in this page.")];
  const names = shownNames(run);
  if (!names.length)
    return [runChoice(index), el("p", { class: "faint" }, "No samples are in this page.")];
  const chosen = names.includes(name)
    ? name
    : samplesNear({ names }, name ? stepOf(name) : Infinity, false) || names.at(-1);
  const note = name && name !== chosen ? `${name} is not in this page; ${chosen} is shown. ` : "";
  Object.assign(browse, { run: index, name: chosen, found: [], open: -1 });
  const list = el("div", { class: "list", id: "list" }),
    place = el("div", { id: "place" });
  const about = el("p", { class: "faint", id: "about" });
  const start = () => fillList(list, about, note, at === null ? null : Number(at));
  start();
  return [browseControls(run, names, start), about, el("div", { class: "browser" }, list, place)];
}

const shownNames = (run) =>
  data.live ? run.names : run.names.filter((name) => name in run.samples);

function runChoice(index) {
  return label(
    "run",
    select(
      data.runs.map((r, i) => [i, r.name]),
      index,
      (i) => {
        location.hash = hash("rollouts", i);
      },
    ),
  );
}

function browseControls(run, names, start) {
  const go = (name) => {
    if (name) location.hash = hash("rollouts", browse.run, name);
  };
  const set = (key) => (value) => {
    filters[key] = value;
    start();
  };
  const input = (key, type, placeholder) => {
    const onchange = (event) => set(key)(event.target.value);
    return el("input", { type, placeholder, value: filters[key], "data-filter": key, onchange });
  };
  const states = ["done", "filtered", "failed", "aborted"].map((state) => [state, state]);
  const place = names.indexOf(browse.name);
  return el(
    "div",
    { class: "controls", id: "filters" },
    data.runs.length > 1 ? runChoice(browse.run) : null,
    el("button", { onclick: () => go(names[place - 1]) }, "◀"),
    label(
      "samples of",
      select(
        names.map((n) => [n, n]),
        browse.name,
        go,
      ),
    ),
    el("button", { onclick: () => go(names[place + 1]) }, "▶"),
    label("text", input("text", "search", "in prompt, reply, error")),
    label("domain", input("domain", "text", "any")),
    label("state", select([["", "any"], ...states], filters.state, set("state"))),
    label("reward", input("least", "number", "from")),
    label("to", input("most", "number", "to")),
    label("tokens", input("shortest", "number", "from")),
    label("to", input("longest", "number", "to")),
    label(
      "in all steps",
      checkbox(filters.everywhere, set("everywhere"), { "data-filter": "everywhere" }),
    ),
    el(
      "span",
      { class: "faint" },
      el("kbd", {}, "n"),
      " next ",
      el("kbd", {}, "p"),
      " previous ",
      el("kbd", {}, "f"),
      " next failure (dropped, or a reward of 0 or less)",
    ),
  );
}

// Lists the samples that pass the filters; a later call ends an earlier one.
async function fillList(list, about, note, openAt) {
  const scan = ++browse.scan,
    run = data.runs[browse.run];
  const names = filters.everywhere ? shownNames(run) : [browse.name];
  Object.assign(browse, { found: [], open: -1 });
  let seen = 0,
    total = 0,
    broken = 0,
    lastGroup = null;
  list.replaceChildren();
  const say = (more) => {
    const skipped = broken ? `${broken} broken lines were skipped. ` : "";
    const passed = `${browse.found.length} of ${seen} samples pass the filters. `;
    about.textContent = note + passed + more + skipped + embeddedNote(run, seen, total);
  };
  try {
    for (const name of names) {
      for await (const page of allSamples(browse.run, name)) {
        if (scan !== browse.scan) return;
        seen += page.samples.length;
        total += page.next === null ? (page.total ?? 0) : 0;
        broken += page.broken;
        for (const sample of page.samples.filter(hasPassed)) {
          const group = `${name} ${sample.prompt_id}`;
          if (group !== lastGroup && browse.found.length < MAX_ROWS_SHOWN)
            list.append(groupHead(name, sample, page.samples));
          lastGroup = group;
          addRow(list, name, sample, openAt);
        }
        say(page.next === null && name === names.at(-1) ? "" : "Reading on… ");
        if (browse.found.length >= MAX_ROWS_SHOWN && openAt === null)
          return say(`Only the first ${MAX_ROWS_SHOWN} are listed: narrow the filters. `);
      }
    }
  } catch (error) {
    return say(`${error.message}. `);
  }
  say("");
  if (openAt !== null && browse.open < 0) {
    const hint = data.live ? "" : "--serve shows all samples.";
    byId("place").replaceChildren(
      el(
        "div",
        { class: "notice" },
        `The sample of this link is not here, or a filter hides it. ${hint}`,
      ),
    );
  }
}

function embeddedNote(run, seen, total) {
  if (data.live) return "";
  const some = total > seen ? `${seen} of these ${total} samples are in this file. ` : "";
  const left = run.names.length - Object.keys(run.samples).length;
  return (
    some +
    (left > 0
      ? `Samples of ${left} of ${run.names.length} steps and evaluations are left out: roll-lite report ${run.name} --serve shows all.`
      : "")
  );
}

function groupHead(name, sample, samples) {
  const rewards = samples
    .filter((s) => s.prompt_id === sample.prompt_id && s.reward !== null)
    .map((s) => Number(s.reward));
  const mean = rewards.length
    ? `mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}`
    : "no reward";
  const prompt = (sample.messages || []).at(-1)?.content ?? sample.prompt_id; // environments have no prompt
  const text = typeof prompt === "string" ? prompt : JSON.stringify(prompt);
  return el(
    "div",
    { class: "group" },
    `${filters.everywhere ? name + " " : ""}${mean}: `,
    ...safeText(text.slice(0, 160)),
  );
}

function addRow(list, name, sample, openAt) {
  const place = browse.found.length;
  const isOpened = sample.at === openAt && name === browse.name;
  const hidden = place >= MAX_ROWS_SHOWN && !isOpened;
  const row = hidden
    ? null
    : el(
        "a",
        {
          class: "row",
          href: hash("sample", browse.run, name, sample.at),
          "data-at": sample.at,
          onclick: (event) => {
            event.preventDefault();
            openSample(place);
          },
        },
        el("span", {}, `#${sample.index}`),
        el(
          "span",
          { class: `reward ${isFailure(sample) ? "bad" : "good"}` },
          sample.state === "done" ? number(sample.reward) : sample.state,
        ),
        el("span", { class: "faint" }, `${sampledTokens(sample) ?? "?"} tokens`),
        el("span", { class: "start" }, ...safeText(String(sample.reply ?? "").slice(0, 120))),
      );
  if (hidden) return;
  browse.found.push({ name, sample, row });
  list.append(row);
  if (isOpened) openSample(place);
}

// Shows a sample beside the list; the address becomes the link that opens it again.
function openSample(place) {
  const entry = browse.found[place];
  if (!entry) return;
  browse.found[browse.open]?.row.classList.remove("chosen");
  browse.open = place;
  entry.row.classList.add("chosen");
  entry.row.scrollIntoView({ block: "nearest" });
  history.replaceState(null, "", hash("sample", browse.run, entry.name, entry.sample.at));
  byId("place").replaceChildren(sampleView(browse.run, entry.name, entry.sample));
}

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !byId("list")) return;
  if (event.key === "n") openSample(browse.open + 1);
  if (event.key === "p") openSample(browse.open - 1);
  if (event.key === "f")
    openSample(browse.found.findIndex((entry, i) => i > browse.open && isFailure(entry.sample)));
});
