// Markdown as elements: headings, lists, quotes, code, bold, italic, and formulas in LaTeX. Links
// and images stay text, and so does all that is not closed.

const MARKS = /`+|\*\*?|\\[^]|\$\$?/g; // where code, bold, italic or a formula may begin
const BLOCKS = [
  { tag: "ul", pattern: /^\s*[-*+]\s+(.*)$/ },
  { tag: "ol", pattern: /^\s*\d{1,9}[.)]\s+(.*)$/ },
  { tag: "blockquote", pattern: /^\s*>\s?(.*)$/ },
];
const FENCE = /^\s*(```+|~~~+)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const FORMULA_BLOCK = /^\s*(\$\$|\\\[|\\begin\{(?:equation|align|gather|eqnarray)\*?\})/;
const isPlain = (line) =>
  line.trim() &&
  ![FENCE, HEADING, FORMULA_BLOCK, ...BLOCKS.map(({ pattern }) => pattern)].some((pattern) =>
    pattern.test(line),
  );

function markdown(text) {
  const lines = text.split("\n"),
    parts = [],
    budget = { left: MAX_FORMULA_NODES };
  for (let i = 0; i < lines.length; ) {
    const [node, next] = markdownBlock(lines, i, budget);
    if (node) parts.push(node);
    i = next;
  }
  return parts;
}

// The first line from `start` on for which it is true, or the number of lines.
function lineWhere(lines, start, isWanted) {
  let i = start;
  while (i < lines.length && !isWanted(lines[i])) i++;
  return i;
}

// The block that begins at a line, and the line after it.
function markdownBlock(lines, start, budget) {
  const fence = lines[start].match(FENCE)?.[1];
  if (fence) {
    const last = lineWhere(lines, start + 1, (line) => line.trimStart().startsWith(fence));
    const code = lines.slice(start + 1, last).join("\n");
    return [el("pre", {}, safeText(code)), last + 1];
  }
  const heading = lines[start].match(HEADING);
  if (heading) return [el("h4", {}, inline(heading[2], budget)), start + 1];
  for (const { tag, pattern } of BLOCKS) {
    const end = lineWhere(lines, start, (line) => !pattern.test(line));
    const found = lines.slice(start, end);
    if (!found.length) continue;
    const item = tag === "blockquote" ? "div" : "li";
    const items = found.map((line) => el(item, {}, inline(line.match(pattern)[1], budget)));
    const first = tag === "ol" ? parseInt(lines[start], 10) : null;
    return [el(tag, { start: first }, items), end];
  }
  if (!lines[start].trim()) return [null, start + 1];
  const opening = lines[start].match(FORMULA_BLOCK)?.[1];
  const found = opening && formulaBlock(lines, start, opening, budget);
  if (found) return found;
  const next = lineWhere(lines, start + 1, (line) => !isPlain(line));
  return [el("p", {}, inline(lines.slice(start, next).join("\n"), budget)), next];
}

const CLOSING = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" };

// A formula over several lines; what follows it on its last line is left there. null if it is not
// closed before another begins.
function formulaBlock(lines, start, opening, budget) {
  const closing = CLOSING[opening] ?? opening.replace("begin", "end");
  let from = lines[start].indexOf(opening) + opening.length;
  for (let last = start; last < lines.length; last++, from = 0) {
    const at = lines[last].indexOf(closing, from);
    const again = opening === closing ? -1 : lines[last].indexOf(opening, from);
    if (again >= 0 && (at < 0 || again < at)) return null;
    if (at < 0) continue;
    const rest = lines[last].slice(at + closing.length);
    const before = lines[last].slice(0, at + closing.length);
    const whole = [...lines.slice(start, last), before].join("\n");
    if (opening === "$$" && hasProse(whole)) return null;
    const isSource = opening.startsWith("\\begin");
    const source = isSource ? whole : whole.trim().slice(opening.length, -closing.length);
    const shown = formula(source.trim(), true, budget);
    const node = el("p", {}, shown ?? safeText(whole));
    if (/^[.,;:]?\s*$/.test(rest)) {
      if (shown && rest.trim()) shown.append(el("math:mtext", {}, rest.trim()));
      else node.append(rest);
      return [node, last + 1];
    }
    lines[last] = rest;
    return [node, last];
  }
  return null;
}

function inline(text, budget) {
  const parts = [],
    marks = new RegExp(MARKS),
    unclosed = new Set(), // marks without an end in the rest of the text: it is not searched again
    runs = new Map([...text.matchAll(/`+/g)].map((run) => [run[0].length, run.index])); // the last
  let done = 0;
  for (let mark; (mark = marks.exec(text)); ) {
    const found = inlinePart(text, mark[0], mark.index, { unclosed, runs, budget });
    if (!found) {
      if (mark[0] === "**") marks.lastIndex -= 1; // its second star may begin something
      continue;
    }
    parts.push(safeText(text.slice(done, mark.index)), found.nodes);
    done = marks.lastIndex = found.end;
  }
  return [...parts, safeText(text.slice(done))].flat();
}

// What a mark begins: its nodes and its end. null if it begins nothing.
function inlinePart(text, mark, start, { unclosed, runs, budget }) {
  const from = start + mark.length;
  if (mark[0] === "`") {
    if (!(runs.get(mark.length) > start)) return null;
    const run = /`+/g;
    run.lastIndex = from;
    let last = run.exec(text);
    while (last[0].length !== mark.length) last = run.exec(text);
    const code = el("code", {}, safeText(text.slice(from, last.index)));
    return { nodes: [code], end: run.lastIndex };
  }
  if (mark[0] === "*") {
    if (unclosed.has(mark) || /[\s*]/.test(text[from] ?? " ")) return null;
    const end = endOfStars(text, mark, from);
    if (end < 0 && mark === "**") unclosed.add(mark);
    if (end < 0) return null;
    const inside = inline(text.slice(from, end), budget);
    return { nodes: [el(mark === "**" ? "b" : "i", {}, inside)], end: end + mark.length };
  }
  return Object.hasOwn(CLOSING, mark) ? inlineFormula(text, mark, start, budget) : null;
}

// Where what stars began ends, or -1: bold before the next two stars that follow a character,
// italic before the next star, if it does.
function endOfStars(text, mark, from) {
  let end = text.indexOf(mark, from + 1);
  while (mark === "**" && end >= 0 && /\s/.test(text[end - 1])) end = text.indexOf(mark, end + 1);
  return end >= 0 && /\s/.test(text[end - 1]) ? -1 : end;
}

function inlineFormula(text, mark, start, budget) {
  const closing = CLOSING[mark];
  const tokens = /\\[^]|\$\$?/g;
  tokens.lastIndex = start + mark.length;
  const isEnd = ([token]) => (mark[0] === "$" ? token[0] === "$" : [mark, closing].includes(token));
  let token = tokens.exec(text);
  while (token && !isEnd(token)) token = tokens.exec(text);
  if (token?.[0] !== closing) return null;
  const end = token.index + closing.length;
  const source = text.slice(start + mark.length, token.index);
  if (mark === "$" && (/^\s|\s$|^$/.test(source) || /\d/.test(text[end] ?? ""))) return null;
  if (mark[0] === "$" && hasProse(source)) return null;
  const shown = formula(source.trim(), mark === "$$" || mark === "\\[", budget);
  return { nodes: shown ? [shown] : safeText(text.slice(start, end)), end };
}

// Two words side by side, or a word that joins: prices in a sentence, rather than a formula.
const PROSE = /(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}|\s(?:and|at|each|for|or|per|to)\s/;
const hasProse = (source) => PROSE.test(source.replace(/\\[A-Za-z]+\{[^{}]*\}/g, " "));
