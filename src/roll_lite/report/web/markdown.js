// Markdown as elements: headings, lists, quotes, code, bold and italic. Links, images and formulas
// stay text, and so does all that is not closed.

const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(\S|\S.*?\S)\*\*|\*([^\s*]|[^\s*][^*]*?[^\s*])\*/;
const BLOCKS = [
  { tag: "ul", pattern: /^\s*[-*+]\s+(.*)$/ },
  { tag: "ol", pattern: /^\s*\d{1,9}[.)]\s+(.*)$/ },
  { tag: "blockquote", pattern: /^\s*>\s?(.*)$/ },
];

function markdown(text) {
  const lines = text.split("\n"),
    parts = [];
  for (let i = 0; i < lines.length; ) {
    const [node, next] = markdownBlock(lines, i);
    if (node) parts.push(node);
    i = next;
  }
  return parts;
}

// The block that begins at a line, and the line after it.
function markdownBlock(lines, start) {
  const fence = lines[start].match(/^\s*(```+|~~~+)/)?.[1];
  if (fence) {
    const end = lines.findIndex((line, i) => i > start && line.trim().startsWith(fence));
    const last = end < 0 ? lines.length : end;
    const code = lines.slice(start + 1, last).join("\n");
    return [el("pre", {}, ...safeText(code)), last + 1];
  }
  const heading = lines[start].match(/^(#{1,6})\s+(.*)$/);
  if (heading) return [el("h4", {}, ...inline(heading[2])), start + 1];
  for (const { tag, pattern } of BLOCKS) {
    const end = lines.findIndex((line, i) => i >= start && !pattern.test(line));
    const found = lines.slice(start, end < 0 ? lines.length : end);
    if (!found.length) continue;
    const item = tag === "blockquote" ? "div" : "li";
    const items = found.map((line) => el(item, {}, ...inline(line.match(pattern)[1])));
    const first = tag === "ol" ? parseInt(lines[start], 10) : null;
    return [el(tag, { start: first }, items), start + found.length];
  }
  if (!lines[start].trim()) return [null, start + 1];
  let next = start + 1;
  const isPlain = (line) =>
    line.trim() &&
    !/^\s*(```|~~~|#{1,6}\s)/.test(line) &&
    !BLOCKS.some(({ pattern }) => pattern.test(line));
  while (next < lines.length && isPlain(lines[next])) next++;
  return [el("p", {}, ...inline(lines.slice(start, next).join("\n"))), next];
}

function inline(text) {
  const parts = [];
  for (let rest = text; ; ) {
    const found = rest.match(INLINE);
    if (!found) return [...parts, ...safeText(rest)];
    const [whole, , code, bold, italic] = found;
    parts.push(...safeText(rest.slice(0, found.index)));
    if (code !== undefined) parts.push(el("code", {}, ...safeText(code)));
    else if (bold !== undefined) parts.push(el("b", {}, ...inline(bold)));
    else parts.push(el("i", {}, ...inline(italic)));
    rest = rest.slice(found.index + whole.length);
  }
}
