"use strict";
// Elements and text. Data only ever become text nodes and attribute values, never HTML.

const NAMESPACES = {
  svg: "http://www.w3.org/2000/svg",
  math: "http://www.w3.org/1998/Math/MathML",
};
const SHOWN_CHARACTERS = 20000;
const PHONE = 800; // pixels of width, as in page.css
// Characters that would reorder or hide text: controls, and marks of writing direction.
const CONTROLS =
  /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/u;

// An element with attributes, listeners (onclick: f), styles (style: {color}) and children.
function el(tag, attributes, ...children) {
  const [name, kind] = tag.split(":").reverse();
  const node = kind
    ? document.createElementNS(NAMESPACES[kind], name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "style") Object.assign(node.style, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(key, value);
  }
  for (const child of children.flat())
    if (child !== null && child !== undefined) node.append(child);
  return node;
}

const byId = (id) => document.getElementById(id);

// A short form of a number; values of a run need not be numbers.
function number(value) {
  if (value === null || value === undefined) return "–";
  const x = Number(value);
  if (!Number.isFinite(x) || Number.isInteger(x)) return String(x);
  const size = Math.abs(x);
  return size >= 1e5 || size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds);
  if (s < 60) return `${seconds < 10 ? Number(seconds.toFixed(1)) : s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days ${Math.floor((s % 86400) / 3600)} h`;
}

// Text in which control characters are named instead of obeyed.
function safeText(text) {
  if (!CONTROLS.test(text)) return [text];
  const parts = [];
  let plain = "";
  for (const character of text) {
    if (!CONTROLS.test(character)) {
      plain += character;
      continue;
    }
    const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(plain, el("span", { class: "control" }, `U+${code}`));
    plain = "";
  }
  return [...parts, plain];
}

// A block of text; a long one is cut, with a button for the rest.
function textBlock(text, className = "", render = safeText) {
  const node = el("div", { class: `text ${className}` });
  const show = (shown) => {
    node.replaceChildren();
    for (const part of render(shown)) node.append(part);
  };
  const whole = typeof text === "string" ? text : JSON.stringify(text, null, 2) || "";
  show(whole.slice(0, SHOWN_CHARACTERS));
  if (whole.length > SHOWN_CHARACTERS) {
    const label = `show all ${whole.length.toLocaleString()} characters`;
    node.append(el("button", { onclick: () => show(whole) }, label));
  }
  return node;
}

// Options are [value, label], and true after them if they cannot be chosen.
function select(options, chosen, onchange, attributes) {
  const node = el("select", { onchange: () => onchange(node.value), ...attributes });
  for (const [value, label, disabled = false] of options) {
    const selected = String(value) === String(chosen) ? "" : null;
    node.append(el("option", { value, selected, disabled }, label));
  }
  return node;
}

function checkbox(isChecked, onchange, attributes) {
  const checked = isChecked ? "" : null;
  return el("input", {
    type: "checkbox",
    checked,
    onchange: (e) => onchange(e.target.checked),
    ...attributes,
  });
}

const tableRow = (...cells) =>
  el(
    "tr",
    {},
    cells.flat().map((cell) => el("td", {}, cell)),
  );
const dot = (background) => el("span", { class: "dot", style: { background } });
const label = (text, control) => el("label", {}, text, control);
const link = (parts, ...children) => el("a", { href: hash(...parts) }, ...children);
const hash = (...parts) => "#" + parts.map(encodeURIComponent).join("/");

// What a reader chose: kept by the browser for later visits or, where it keeps nothing, until the
// page is closed.
const choices = {};

function remembered(name, otherwise) {
  if (!Object.hasOwn(choices, name))
    try {
      choices[name] = JSON.parse(localStorage.getItem(`roll_lite/${name}`)) ?? otherwise;
    } catch {
      choices[name] = otherwise;
    }
  return choices[name];
}

function remember(name, value) {
  choices[name] = value;
  try {
    localStorage.setItem(`roll_lite/${name}`, JSON.stringify(value));
  } catch {
    // Without storage it lasts as long as the page.
  }
}

// A section that folds, and is found as it was left.
function fold(title, isOpen, ...children) {
  const left = remembered("folds", {});
  const node = el(
    "details",
    { class: "fold", open: (left[title] ?? isOpen) ? "" : null },
    el(
      "summary",
      { onclick: () => remember("folds", { ...remembered("folds", {}), [title]: !node.open }) },
      el("h2", {}, title),
    ),
    ...children,
  );
  return node;
}

// Pixels for a drawing as wide as the page.
function pageWidth() {
  const { paddingLeft, paddingRight } = getComputedStyle(byId("main"));
  return byId("main").clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
}

// Calls `draw` with the node's width when it comes into view, and again when its width changes.
function whenVisible(node, draw) {
  let width = 0;
  const sizes = new ResizeObserver(() => {
    if (!node.clientWidth || node.clientWidth === width) return;
    width = node.clientWidth;
    draw(width);
  });
  const observer = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      sizes.observe(node);
    },
    { rootMargin: "300px" },
  );
  observer.observe(node);
}
