// One sample: how it scored, its conversation, and its tokens in colour.

const MAX_TOKENS_SHOWN = 3000;
const KINDS = ["logprob", "mismatch", "advantage", "entropy", "version"];
// Why a sample has no such numbers.
const NOT_KNOWN = {
  logprob: "not recorded",
  mismatch: "not trained on",
  advantage: "not trained on",
  entropy: "not trained on",
  version: "not recorded",
};
const NUM_SHADES = 9; // of the scale
const tokenSettings = { by: "logprob" };
const textSettings = { isMarkdown: false };

function sampleView(runIndex, name, sample) {
  const run = data.runs[runIndex];
  return el(
    "div",
    { id: "sample" },
    sampleHead(runIndex, name, sample),
    facts(sample),
    sample.reason
      ? el("div", { id: "reason" }, "reason: ", el("b", {}, safeText(String(sample.reason))))
      : null,
    sample.why
      ? el("div", { class: "notice" }, "dropped: ", safeText(String(sample.why)))
      : null,
    sample.error
      ? [el("h3", { class: "bad" }, "Error"), textBlock(sample.error, "bad error")]
      : null,
    conversationView(sample),
    tokensView(run, sample),
    others(sample),
    replayCommand(run, name, sample),
  );
}

function sampleHead(runIndex, name, sample) {
  const { open } = browse;
  return el(
    "div",
    { class: "controls" },
    el("button", { onclick: () => openSample(open - 1), title: "previous (p)" }, "◀"),
    el("button", { onclick: () => openSample(open + 1), title: "next (n)" }, "▶"),
    el(
      "button",
      { class: "group-button", onclick: () => openGroup(name, sample) },
      "group side by side",
    ),
    el(
      "a",
      { class: "text", href: hash("sample", runIndex, name, sample.at), title: "link to this sample" },
      name,
      " ",
      safeText(String(sample.prompt_id)),
      ` #${sample.index}`,
    ),
  );
}

// What generates this sample again; evaluations, whose visits are negative, are not repeated.
function replayCommand(run, name, sample) {
  if (!name.startsWith("step_") || !(sample.visit >= 0)) return null;
  const id = `${stepOf(name)}/${sample.prompt_id}/${sample.index}`;
  const command = ["roll-lite replay", quoted(run.name), "--sample", quoted(id)];
  return el(
    "div",
    { class: "faint" },
    "again: ",
    el("code", { id: "replay" }, safeText(command.join(" "))),
  );
}

// A word of a shell's command.
const quoted = (text) =>
  /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;

function facts(sample) {
  const cells = {
    state: sample.state,
    reward: number(sample.reward),
    domain: sample.domain,
    advantage: number(sampleAdvantage(sample)),
    tokens: sampledTokens(sample),
    turns: sample.turns?.length,
    end: sample.end,
  };
  for (const [part, value] of Object.entries(sample.parts || {}))
    cells[`part ${part}`] = typeof value === "number" ? number(value) : optionText(value);
  const known = Object.entries(cells).filter(
    ([, value]) => value !== undefined && value !== null && value !== "" && value !== "–",
  );
  return el(
    "dl",
    { id: "facts" },
    known.map(([name, value]) =>
      el("div", {}, el("dt", {}, safeText(name)), el("dd", {}, ...safeText(String(value)))),
    ),
  );
}

function sampledTokens(sample) {
  if (Array.isArray(sample.turns) && sample.turns.length)
    return sample.turns.reduce((n, turn) => n + (turn.sampled || 0), 0);
  return sample.tokens ?? null;
}

// The advantage of all tokens, or the mean of theirs; null without training.
function sampleAdvantage({ advantages }) {
  if (typeof advantages === "number") return advantages;
  const all = [...numbersOf(advantages)];
  return all.length ? all.reduce((a, b) => a + b, 0) / all.length : null;
}

function conversationView(sample) {
  let shown = conversation(sample);
  const isMarkdown = checkbox(textSettings.isMarkdown, (isChecked) => {
    textSettings.isMarkdown = isChecked;
    const old = shown;
    shown = conversation(sample);
    old.replaceWith(shown);
  });
  isMarkdown.id = "markdown";
  const head = el("div", { class: "controls" }, el("h3", {}, "Conversation"));
  head.append(label("Markdown, LaTeX", isMarkdown));
  return [head, shown];
}

const messageText = (text) =>
  typeof text === "string" && textSettings.isMarkdown
    ? textBlock(text, "markdown", markdown)
    : textBlock(text);

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
        el("div", { class: "role" }, safeText(String(message.role)), reward),
        messageText(message.content ?? ""),
        message.tool_calls ? textBlock(message.tool_calls) : null,
      );
    }),
  );
}

// Numbers of sampled tokens: base64 of float32.
function numbersOf(packed) {
  try {
    const bytes = Uint8Array.from(atob(packed ?? ""), (character) => character.charCodeAt(0));
    return new Float32Array(bytes.buffer, 0, bytes.length >> 2);
  } catch {
    return [];
  }
}

// Ids with what KINDS says of them, in the order in which they were read and sampled.
function tokens(sample) {
  const found = [],
    turns = sample.turns || [],
    ids = sample.token_ids || [],
    logprobs = numbersOf(sample.logprobs),
    entropies = numbersOf(sample.entropies),
    mismatches = numbersOf(sample.mismatches),
    isOne = typeof sample.advantages === "number",
    advantages = isOne ? [] : numbersOf(sample.advantages);
  let at = 0,
    sampled = 0;
  for (const turn of (sample.sequences || [turns.map((_, i) => i)]).flat()) {
    const { read = 0, sampled: count = 0, versions = [] } = turns[turn] || {};
    for (let i = 0; i < read && at < ids.length; i++)
      found.push({ id: ids[at++], turn, isRead: true });
    for (let i = 0; i < count && at < ids.length; i++, sampled++) {
      const version = versions.filter(([first]) => first <= i).at(-1)?.[1];
      found.push({
        id: ids[at++],
        turn,
        logprob: logprobs[sampled],
        mismatch: mismatches[sampled],
        advantage: isOne ? sample.advantages : advantages[sampled],
        entropy: entropies[sampled],
        version,
      });
    }
  }
  return found;
}

function tokensView(run, sample) {
  const found = tokens(sample);
  if (!found.length)
    return el("p", { class: "faint" }, "No token ids are recorded for this sample.");
  const body = el("div", { class: "text tokens", id: "tokens" }),
    readout = el("div", { class: "readout" }, "point at a token, or tap it"),
    legend = el("span", { id: "scale", class: "faint" });
  const kinds = KINDS.filter((kind) =>
    found.some((t) => t[kind] !== undefined && t[kind] !== null),
  );
  if (!kinds.includes(tokenSettings.by)) tokenSettings.by = kinds[0] || "logprob";
  let limit = MAX_TOKENS_SHOWN,
    withRead = false;
  const draw = () => {
    const shade = shadeOf(found);
    legend.replaceChildren(...scaleOf(shade));
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
          KINDS.map((k) => (kinds.includes(k) ? [k, k] : [k, `${k} (${NOT_KNOWN[k]})`, true])),
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
      legend,
    ),
    readout,
    body,
  );
}

// Backgrounds of tokens, graded by a number; each version has its own.
function shadeOf(found) {
  const by = tokenSettings.by;
  const known = found.map((t) => t[by]).filter((value) => value !== undefined && value !== null);
  if (by === "version")
    return {
      by,
      values: [...new Set(known)].sort((a, b) => a - b),
      fill: (value) => `hsl(${(value * 67) % 360} 70% 50% / 0.3)`,
    };
  if (by === "logprob")
    return { by, ends: [0, -6], fill: (value) => `rgb(220 50 40 / ${share(-value, 6) * 0.85})` };
  if (by === "mismatch") return { by, ends: [0.001, 1], isLog: true, fill: mismatchFill };
  if (by === "entropy")
    return { by, ends: [0, 3], fill: (value) => `rgb(40 90 220 / ${share(value, 3) * 0.85})` };
  const most = known.reduce((m, value) => Math.max(m, Math.abs(value)), 1e-9);
  const fill = (value) =>
    `rgb(${value > 0 ? "30 150 60" : "220 50 40"} / ${share(Math.abs(value), most) * 0.7})`;
  return { by, ends: [-most, most], fill };
}

// In powers of ten: rounding in bf16 is a few thousandths, and 0.7 is twice as likely.
const mismatchFill = (value) => `rgb(160 40 200 / ${share(Math.log10(value) + 3, 3) * 0.85})`;
const share = (value, most) => Math.max(0, Math.min(1, value / most));

// What the colours mean: from end to end, or version by version.
function scaleOf({ by, values, ends, isLog, fill }) {
  const cell = (value, text = "") =>
    el("span", { class: "shade", style: { backgroundColor: fill(value) } }, text);
  if (values) return [`${by} `, ...values.map((value) => cell(value, String(value)))];
  const [low, high] = ends;
  const between = Array.from({ length: NUM_SHADES }, (_, i) => {
    const part = i / (NUM_SHADES - 1);
    return isLog ? low * (high / low) ** part : low + (high - low) * part;
  });
  const before = isLog ? " or less" : "";
  const beyond = by === "advantage" ? "" : high < 0 ? " or less" : " or more";
  return [
    `${number(low)}${before} `,
    ...between.map((value) => cell(value)),
    ` ${number(high)}${beyond}`,
  ];
}

function tokenNode(run, token, shade, readout) {
  const text = run.texts?.[token.id];
  const about = [`token ${token.id}`, `turn ${token.turn + 1}`];
  if (token.isRead) about.push("read");
  else
    about.push(
      ...KINDS.filter((kind) => token[kind] !== undefined).map(
        (kind) => `${kind} ${Number(Number(token[kind]).toPrecision(7))}`,
      ),
    );
  if (token.logprob !== undefined) about.push(`probability ${number(Math.exp(token.logprob))}`);
  const title = about.join(", ");
  const isShaded = !token.isRead && Number.isFinite(token[shade.by]);
  return el(
    "span",
    {
      class: token.isRead ? "token read" : "token",
      title,
      style: { backgroundColor: isShaded ? shade.fill(token[shade.by]) : "" },
      onclick: () => {
        readout.textContent = title;
      },
      onpointerenter: () => {
        readout.textContent = title;
      },
    },
    safeText(text === undefined ? `⟨${token.id}⟩ ` : text.replace(/\n/g, "↵\n")),
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
