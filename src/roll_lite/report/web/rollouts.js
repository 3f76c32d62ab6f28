// The rollout browser: a run's steps, their groups and samples, with filters and keys.

const MAX_ROWS_SHOWN = 1000;
const MAX_BINS = 20;
const SORTS = {
  recorded: "as recorded",
  "reward down": "highest reward",
  "reward up": "lowest reward",
  "tokens down": "longest",
  "tokens up": "shortest",
  "advantage down": "highest advantage",
  "advantage up": "lowest advantage",
  "effect up": "hurt most",
  "effect down": "helped most",
};
const SORTED_BY = {
  reward: (sample) => sample.reward,
  tokens: sampledTokens,
  advantage: sampleAdvantage,
  effect: (sample) => sample.effect,
};
const filters = {
  sort: "recorded",
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
    throw new Error(`the server said ${response.status}: is the run folder still there?`);
  const page = await response.json();
  Object.assign(run.texts, page.texts);
  return page;
}

// All samples of a name, page after page.
async function* allSamples(runIndex, name) {
  for (let start = 0; start !== null;) {
    const page = await loadSamples(runIndex, name, start);
    for (const sample of page.samples) sample.effect = effectOn(data.runs[runIndex], name, sample);
    yield page;
    start = page.next;
  }
}

// What roll-lite influence found of a sample or its group.
const effectOn = (run, name, { prompt_id, visit, index }) =>
  (run.effects[name] || []).find(
    (row) =>
      row?.prompt_id === prompt_id && row.visit === visit && [undefined, index].includes(row.index),
  )?.effect;

const inside = (value, low, high) =>
  (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));

function hasReward({ reward }) {
  if (filters.least === "" && filters.most === "") return true;
  return typeof reward === "number" && inside(reward, filters.least, filters.most);
}

// All filters but that of the reward, whose histogram also shows what it leaves out.
function hasPassed(sample) {
  return (
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

const groupsView = (runIndex, name, at) => rolloutsView(runIndex, name, at, openGroup);

// The samples of a name and beside them, with `at`, one of them or, with openGroup, its group.
function rolloutsView(runIndex = 0, name = null, at = null, openAs = null) {
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
  const nodes = {
    list: el("div", { class: "list", id: "list" }),
    about: el("p", { class: "faint", id: "about" }),
    histogram: el("div", { id: "histogram" }),
  };
  const start = () => fillList(nodes, note, at === null ? null : Number(at), openAs);
  start();
  const listing = el("div", { class: "listing" }, nodes.about, nodes.histogram, nodes.list);
  const place = el("div", { id: "place" });
  return [browseControls(run, names, start), el("div", { class: "browser" }, listing, place)];
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
    label("sort", select(Object.entries(SORTS), filters.sort, set("sort"), { id: "sort" })),
    el(
      "details",
      { class: "more-filters", open: innerWidth > PHONE ? "" : null },
      el("summary", {}, "filters"),
      el(
        "div",
        { class: "controls" },
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
      ),
    ),
  );
}

// Lists the samples that pass the filters; a later call ends an earlier one.
async function fillList({ list, about, histogram }, note, openAt, openAs) {
  const scan = ++browse.scan,
    run = data.runs[browse.run],
    isSorted = filters.sort !== "recorded";
  const names = filters.everywhere ? shownNames(run) : [browse.name];
  Object.assign(browse, { found: [], open: -1 });
  const rewards = [];
  let seen = 0,
    total = 0,
    passed = 0,
    broken = 0,
    lastGroup = null;
  list.replaceChildren();
  const say = (more, isReading = false) => {
    const skipped = broken ? `${broken} broken lines were skipped. ` : "";
    about.textContent = `${note}${passed} of ${seen} samples pass the filters. ${more}${skipped}${embeddedNote(run, seen, total)}`;
    if (isReading) return;
    const start = () => fillList({ list, about, histogram }, note, null, null);
    histogram.replaceChildren(...rewardBins(rewards, start));
  };
  try {
    for (const name of names) {
      for await (const page of allSamples(browse.run, name)) {
        if (scan !== browse.scan) return;
        seen += page.samples.length;
        total += page.next === null ? (page.total ?? 0) : 0;
        broken += page.broken;
        const found = page.samples.filter(hasPassed);
        rewards.push(...found.map((s) => s.reward).filter((r) => typeof r === "number"));
        for (const sample of found.filter(hasReward)) {
          passed++;
          const entry = { name, sample, row: null };
          if (isSorted || browse.found.length < MAX_ROWS_SHOWN || isAt(entry, openAt))
            browse.found.push(entry);
          if (isSorted || browse.found.at(-1) !== entry) continue;
          const group = `${name} ${sample.prompt_id}`;
          if (group !== lastGroup) list.append(groupHead(name, sample, page.samples));
          lastGroup = group;
          addRow(list, browse.found.length - 1);
        }
        if (isSorted) browse.found = sorted(browse.found).slice(0, MAX_ROWS_SHOWN);
        say("Reading on… ", true);
        if (!isSorted && browse.found.length >= MAX_ROWS_SHOWN && openAt === null)
          return say(`Only the first ${MAX_ROWS_SHOWN} are listed: narrow the filters. `);
      }
    }
  } catch (error) {
    return say(`${error.message}. `);
  }
  if (isSorted) browse.found.forEach((_, place) => addRow(list, place));
  say(passed > browse.found.length ? `Only ${browse.found.length} are listed. ` : "");
  if (openAt !== null) openFound(openAt, openAs);
  else if (innerWidth > PHONE && browse.open < 0) openSample(0);
}

const isAt = ({ name, sample }, at) => sample.at === at && name === browse.name;

function openFound(at, openAs) {
  const place = browse.found.findIndex((entry) => isAt(entry, at));
  const hint = data.live ? "" : "--serve shows all samples.";
  if (place < 0)
    byId("place").replaceChildren(
      el(
        "div",
        { class: "notice" },
        `The sample of this link is not here, or a filter hides it. ${hint}`,
      ),
    );
  else if (openAs) openAs(browse.name, browse.found[place].sample);
  else openSample(place);
}

// In the chosen order; samples without the number come last.
function sorted(entries) {
  const [key, direction] = filters.sort.split(" ");
  const sign = direction === "up" ? 1 : -1;
  const value = ({ sample }) => {
    const x = SORTED_BY[key](sample);
    return typeof x === "number" ? sign * x : Infinity;
  };
  const keyed = entries.map((entry) => [value(entry), entry]);
  return keyed.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0)).map(([, entry]) => entry);
}

// Rewards in bins: one for each value or, of many values, of equal width.
function binned(rewards) {
  const values = [...rewards].sort((a, b) => a - b),
    distinct = new Set(values).size,
    width = (values.at(-1) - values[0]) / MAX_BINS,
    found = [];
  let last = null;
  for (const value of values) {
    const number = Math.min(MAX_BINS - 1, Math.floor((value - values[0]) / width));
    const key = distinct > MAX_BINS ? number : value;
    if (key !== last) found.push({ from: value, to: value, count: 0 });
    last = key;
    Object.assign(found.at(-1), { to: value, count: found.at(-1).count + 1 });
  }
  return found;
}

// A histogram; a click on a bar lists its samples, and another one all.
function rewardBins(rewards, start) {
  const found = binned(rewards);
  if (found.length < 2) return [];
  const most = found.reduce((high, bin) => Math.max(high, bin.count), 0);
  const choose = (least, most) => {
    const isChosen = filters.least === least && filters.most === most;
    Object.assign(filters, isChosen ? { least: "", most: "" } : { least, most });
    for (const key of ["least", "most"])
      document.querySelector(`[data-filter=${key}]`).value = filters[key];
    start();
  };
  const bars = found.map(({ from, to, count }) => {
    const between = from === to ? number(from) : `${number(from)} to ${number(to)}`;
    const isLeftOut = !inside(from, filters.least, filters.most);
    return el(
      "button",
      {
        class: `bin ${isLeftOut ? "left-out" : ""}`,
        title: `${count} samples of reward ${between}`,
        onclick: () => choose(String(from), String(to)),
      },
      el("span", { style: { height: `${Math.max(2, (44 * count) / most)}px` } }),
      found.length <= 6 ? el("small", {}, number(from)) : null,
    );
  });
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const ends = `rewards from ${number(found[0].from)} to ${number(found.at(-1).to)}, mean ${number(mean)}`;
  return [el("div", { class: "bins" }, bars), el("div", { class: "faint" }, ends)];
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
    el("button", { onclick: () => openGroup(name, sample), title: "side by side" }, "▥"),
    el(
      "span",
      {},
      `${filters.everywhere ? name + " " : ""}${mean}: `,
      safeText(text.slice(0, 160)),
    ),
  );
}

function addRow(list, place) {
  const entry = browse.found[place],
    { name, sample } = entry;
  const sortedBy = filters.sort.split(" ")[0];
  const advantage = sortedBy === "advantage" ? `A ${number(sampleAdvantage(sample))}` : null;
  entry.row = el(
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
    rewardOf(sample),
    effectOf(sample),
    el(
      "span",
      { class: "faint" },
      [`${sampledTokens(sample) ?? "?"} tokens`, advantage].filter(Boolean).join(", "),
    ),
    el("span", { class: "start" }, safeText(String(sample.reply ?? "").slice(0, 120))),
  );
  list.append(entry.row);
}

const rewardOf = (sample) =>
  el(
    "span",
    { class: `reward ${isFailure(sample) ? "bad" : "good"}` },
    sample.state === "done" ? number(sample.reward) : sample.state,
  );

function effectOf({ effect }) {
  if (typeof effect !== "number") return null;
  const word = effect < 0 ? "hurt" : effect > 0 ? "helped" : "no effect";
  const kind = effect < 0 ? "bad" : effect > 0 ? "good" : "faint";
  const title = "what it added to the mean logprob of right held-out answers, in nats";
  const size = effect ? ` ${number(Math.abs(effect))}` : "";
  return el("span", { class: `effect ${kind}`, title }, word + size);
}

// Shows a sample beside the list; the address becomes the link that opens it again.
function openSample(place) {
  const entry = browse.found[place];
  if (!entry) return;
  browse.found[browse.open]?.row.classList.remove("chosen");
  browse.open = place;
  entry.row.classList.add("chosen");
  showPlace(
    hash("sample", browse.run, entry.name, entry.sample.at),
    sampleView(browse.run, entry.name, entry.sample),
  );
  if (innerWidth > PHONE) entry.row.scrollIntoView({ block: "nearest" });
}

// On a phone the list gives way to what is opened.
function showPlace(address, node) {
  history.replaceState(null, "", address);
  byId("place").replaceChildren(node);
  byId("place").parentNode.classList.add("open");
  if (innerWidth <= PHONE) scrollTo(0, 0);
}

// Shows all samples of a prompt beside each other, also those that a filter hides.
async function openGroup(name, sample) {
  const isOfGroup = (other) =>
    other.prompt_id === sample.prompt_id && other.visit === sample.visit;
  const found = [],
    run = browse.run,
    scan = browse.scan;
  for await (const page of allSamples(run, name)) found.push(...page.samples.filter(isOfGroup));
  if (scan !== browse.scan) return;
  const messages = (sample.messages || []).slice(-1);
  showPlace(
    hash("group", run, name, sample.at),
    el(
      "div",
      { id: "group" },
      el("h3", {}, `${name}, ${found.length} samples of `, safeText(String(sample.prompt_id))),
      messages.map((message) => messageText(message.content ?? "")),
      el("div", { class: "columns" }, found.map((other) => groupColumn(run, name, other))),
    ),
  );
}

function groupColumn(run, name, sample) {
  const advantage = sampleAdvantage(sample);
  const facts = [
    advantage === null ? null : `advantage ${number(advantage)}`,
    `${sampledTokens(sample) ?? "?"} tokens`,
    sample.end,
  ];
  return el(
    "div",
    { class: "column" },
    el("a", { href: hash("sample", run, name, sample.at) }, `#${sample.index}`),
    " ",
    rewardOf(sample),
    " ",
    effectOf(sample),
    el("div", { class: "faint" }, safeText(facts.filter(Boolean).join(", "))),
    sample.reason ? el("div", {}, safeText(String(sample.reason))) : null,
    sample.transcript ? conversation(sample) : messageText(sample.reply ?? sample.error ?? ""),
  );
}

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !byId("list")) return;
  if (event.key === "n") openSample(browse.open + 1);
  if (event.key === "p") openSample(browse.open - 1);
  if (event.key === "f")
    openSample(browse.found.findIndex((entry, i) => i > browse.open && isFailure(entry.sample)));
});
