// One sample: how it scored, its conversation, and its tokens in colour.

const MAX_TOKENS_SHOWN = 3000;
const KINDS = ["logprob", "advantage", "version"];
const tokenSettings = { by: "logprob" };

function sampleView(runIndex, name, sample) {
  const run = data.runs[runIndex];
  return el(
    "div",
    { id: "sample" },
    el(
      "h2",
      {},
      `${run.name} ${name}, `,
      el("span", { class: "text" }, ...safeText(String(sample.prompt_id))),
      ` #${sample.index}`,
    ),
    el("div", {}, link(["sample", runIndex, name, sample.at], "link to this sample")),
    facts(sample),
    sample.why
      ? el("div", { class: "notice" }, "dropped: ", ...safeText(String(sample.why)))
      : null,
    sample.error
      ? [el("h3", { class: "bad" }, "Error"), textBlock(sample.error, "bad error")]
      : null,
    el("h3", {}, "Conversation"),
    conversation(sample),
    tokensView(run, sample),
    others(sample),
  );
}

function facts(sample) {
  const cells = {
    state: sample.state,
    reward: number(sample.reward),
    domain: sample.domain,
    tokens: sampledTokens(sample),
    turns: sample.turns?.length,
    end: sample.end,
  };
  for (const [part, value] of Object.entries(sample.parts || {}))
    cells[`part ${part}`] = typeof value === "number" ? number(value) : optionText(value);
  const known = Object.entries(cells).filter(
    ([, value]) => value !== undefined && value !== null && value !== "",
  );
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { id: "facts" },
      el(
        "tr",
        {},
        known.map(([k]) => el("th", {}, ...safeText(k))),
      ),
      el(
        "tr",
        {},
        known.map(([, v]) => el("td", {}, ...safeText(String(v)))),
      ),
    ),
  );
}

function sampledTokens(sample) {
  if (Array.isArray(sample.turns) && sample.turns.length)
    return sample.turns.reduce((n, turn) => n + (turn.sampled || 0), 0);
  return sample.tokens ?? null;
}

// The turns as messages; a reply that the messages do not hold comes last.
function conversation(sample) {
  const messages = [...(sample.transcript || sample.messages || [])];
  if (!sample.transcript) messages.push({ role: "assistant", content: sample.reply ?? "" });
  let turn = -1;
  return el(
    "div",
    { id: "conversation" },
    messages.map((message) => {
      const isReply = message.role === "assistant" && (turn += 1) >= 0;
      const result = isReply && sample.transcript ? sample.turns?.[turn] : null;
      const reward =
        result && result.reward !== undefined
          ? `, turn ${turn + 1}: reward ${number(result.reward)}`
          : "";
      return el(
        "div",
        { class: `message ${isReply ? "assistant" : "other"}` },
        el("div", { class: "role" }, ...safeText(String(message.role)), reward),
        textBlock(message.content ?? ""),
        message.tool_calls ? textBlock(message.tool_calls) : null,
      );
    }),
  );
}

// Ids with logprob, version and advantage, in the order in which they were read and sampled.
function tokens(sample) {
  const found = [],
    turns = sample.turns || [],
    ids = sample.token_ids || [];
  let at = 0,
    sampled = 0;
  for (const turn of (sample.sequences || [turns.map((_, i) => i)]).flat()) {
    const { read = 0, sampled: count = 0, versions = [] } = turns[turn] || {};
    for (let i = 0; i < read && at < ids.length; i++)
      found.push({ id: ids[at++], turn, isRead: true });
    for (let i = 0; i < count && at < ids.length; i++, sampled++) {
      const version = versions.filter(([first]) => first <= i).at(-1)?.[1];
      const advantage = Array.isArray(sample.advantages)
        ? sample.advantages[sampled]
        : sample.advantages;
      found.push({ id: ids[at++], turn, logprob: sample.logprobs?.[sampled], version, advantage });
    }
  }
  return found;
}

function tokensView(run, sample) {
  const found = tokens(sample);
  if (!found.length)
    return el("p", { class: "faint" }, "No token ids are recorded for this sample.");
  const body = el("div", { class: "text tokens", id: "tokens" }),
    readout = el("div", { class: "readout" }, "point at a token, or tap it");
  const kinds = KINDS.filter((kind) =>
    found.some((t) => t[kind] !== undefined && t[kind] !== null),
  );
  if (!kinds.includes(tokenSettings.by)) tokenSettings.by = kinds[0] || "logprob";
  let limit = MAX_TOKENS_SHOWN,
    withRead = false;
  const draw = () => {
    const shade = shadeOf(found);
    const shown = found.filter((t) => withRead || !t.isRead);
    body.replaceChildren(...shown.slice(0, limit).map((t) => tokenNode(run, t, shade, readout)));
    if (shown.length > limit)
      body.append(
        el(
          "button",
          {
            onclick: () => {
              limit = Infinity;
              draw();
            },
          },
          `show all ${shown.length} tokens`,
        ),
      );
  };
  draw();
  return el(
    "div",
    {},
    el("h3", {}, "Tokens"),
    el(
      "div",
      { class: "controls" },
      label(
        "colour",
        select(
          kinds.map((k) => [k, k]),
          tokenSettings.by,
          (k) => {
            tokenSettings.by = k;
            draw();
          },
        ),
      ),
      label(
        "with what was read",
        checkbox(false, (isChecked) => {
          withRead = isChecked;
          draw();
        }),
      ),
      el(
        "span",
        { class: "faint" },
        "red: unlikely token, or negative advantage; green: positive advantage",
      ),
    ),
    readout,
    body,
  );
}

// A background for each token: by logprob, advantage or version.
function shadeOf(found) {
  const by = tokenSettings.by;
  if (by === "version")
    return (t) => (t.version === undefined ? "" : `hsl(${(t.version * 67) % 360} 70% 50% / 0.3)`);
  if (by === "logprob") return (t) => `rgb(220 50 40 / ${Math.min(0.85, -(t.logprob || 0) / 6)})`;
  const most = found.reduce((m, t) => Math.max(m, Math.abs(Number(t.advantage) || 0)), 1e-9);
  return (t) =>
    t.advantage
      ? `rgb(${t.advantage > 0 ? "30 150 60" : "220 50 40"} / ${(Math.abs(t.advantage) / most) * 0.7})`
      : "";
}

function tokenNode(run, token, shade, readout) {
  const text = run.texts?.[token.id];
  const about = [`token ${token.id}`, `turn ${token.turn + 1}`];
  if (token.isRead) about.push("read");
  else
    about.push(
      ...KINDS.filter((kind) => token[kind] !== undefined).map((kind) => `${kind} ${token[kind]}`),
    );
  if (token.logprob !== undefined) about.push(`probability ${number(Math.exp(token.logprob))}`);
  const title = about.join(", ");
  return el(
    "span",
    {
      class: token.isRead ? "token read" : "token",
      title,
      style: { backgroundColor: token.isRead ? "" : shade(token) },
      onclick: () => {
        readout.textContent = title;
      },
      onpointerenter: () => {
        readout.textContent = title;
      },
    },
    ...safeText(text === undefined ? `⟨${token.id}⟩ ` : text.replace(/\n/g, "↵\n")),
  );
}

function others(sample) {
  const rows = ["ground_truth", "tests", "extra"].filter(
    (name) => sample[name] && Object.keys(sample[name]).length,
  );
  const events = (sample.events || []).map(
    ([state, time, version], i, all) =>
      `${state} at ${(time - all[0][1]).toFixed(3)} s, version ${version}`,
  );
  return el(
    "div",
    {},
    rows.map((name) => [el("h3", {}, name), textBlock(sample[name])]).flat(),
    events.length
      ? [el("h3", {}, "Events"), el("div", { class: "faint" }, events.join("; "))]
      : null,
  );
}
