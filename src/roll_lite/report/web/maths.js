// Formulas in LaTeX as MathML, which browsers draw themselves: the part of it that replies use. A
// formula with anything else in it is not understood, and stays its source.

const MAX_FORMULA = 10000, // characters
  MAX_DEPTH = 40, // of groups and arguments in each other
  MAX_FORMULA_NODES = 20000; // of all formulas of a text

const table = (text) => {
  const words = text.trim().split(/\s+/);
  return new Map(words.flatMap((word, i) => (i % 2 ? [] : [[word, words[i + 1]]])));
};
const names = (text) => new Set(text.trim().split(/\s+/));

const LETTERS = table(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι
  kappa κ lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ
  upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω imath ı jmath ȷ ell ℓ`);
// Signs that stand upright and without space of their own.
const ORDINARY = table(`
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂
  nabla ∇ emptyset ∅ varnothing ∅ aleph ℵ hbar ℏ Re ℜ Im ℑ wp ℘ angle ∠ triangle △ square □ Box □
  blacksquare ■ checkmark ✓ degree ° prime ′ top ⊤ bot ⊥ complement ∁ dots … ldots … dotsc … cdots ⋯
  dotsb ⋯ dotsm ⋯ vdots ⋮ ddots ⋱ % % $ $ # # & & _ _ backslash \\ pounds £ diamond ⋄`);
const OPERATORS = table(`
  cdot ⋅ times × div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙
  cup ∪ cap ∩ setminus ∖ smallsetminus ∖ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬ forall ∀ exists ∃
  nexists ∄ le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ lt < gt > ne ≠ neq ≠ ll ≪ gg ≫ approx ≈
  equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ prec ≺ succ ≻ preceq ⪯ succeq ⪰ lesssim ≲ gtrsim ≳ asymp ≍
  triangleq ≜ doteq ≐ coloneqq ≔ colon : in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ subsetneq ⊊
  nsubseteq ⊈ supset ⊃ supseteq ⊇ supsetneq ⊋ mid ∣ nmid ∤ parallel ∥ nparallel ∦ perp ⊥ models ⊨
  vdash ⊢ vDash ⊨ therefore ∴ because ∵ to → rightarrow → longrightarrow ⟶ leftarrow ← gets ←
  longleftarrow ⟵ leftrightarrow ↔ Rightarrow ⇒ Longrightarrow ⟹ implies ⟹ Leftarrow ⇐ impliedby ⟸
  Leftrightarrow ⇔ Longleftrightarrow ⟺ iff ⟺ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ uparrow ↑
  downarrow ↓ nearrow ↗ searrow ↘ rightharpoonup ⇀ rightleftharpoons ⇌ int ∫ iint ∬ iiint ∭ oint ∮
  bmod mod mod mod rtimes ⋊ ltimes ⋉ trianglelefteq ⊴ triangleleft ◁ - − * ∗`);
// What has its scripts above and below.
const LIMITS = table(`
  sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆
  lim lim max max min min sup sup inf inf`)
  .set("limsup", "lim sup")
  .set("liminf", "lim inf");
const FUNCTIONS = names(`
  sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker deg gcd
  arg hom Pr`);
const FENCES = table(`
  ( ( ) ) [ [ ] ] | | / / \\{ { \\} } \\lbrace { \\rbrace } \\lbrack [ \\rbrack ] \\| ‖ \\vert |
  \\lvert | \\rvert | \\Vert ‖ \\lVert ‖ \\rVert ‖ \\langle ⟨ \\rangle ⟩ \\lfloor ⌊ \\rfloor ⌋
  \\lceil ⌈ \\rceil ⌉ < ⟨ > ⟩`);
const SPACES = table(`
  , 0.167em thinspace 0.167em : 0.222em > 0.222em ; 0.278em ! -0.167em enspace 0.5em quad 1em
  qquad 2em space 0.25em`)
  .set(" ", "0.25em")
  .set("\n", "0.25em");
const SIZES = table("big 1.2em Big 1.8em bigg 2.4em Bigg 3em");
const ACCENTS = table(`
  hat ^ widehat ^ bar ¯ vec → overrightarrow → overleftarrow ← dot ˙ ddot ¨ tilde ~ widetilde ~
  check ˇ breve ˘ acute ´ grave \` mathring ˚`);
const LINES = table("overline over underline under boxed boxed fbox boxed");
// Letters of an alphabet follow its A, except for these.
const DOUBLE_STRUCK = [0x1d538, table("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ")];
const SCRIPT = [0x1d49c, table("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ")];
const FRAKTUR = [0x1d504, table("C ℭ H ℌ I ℑ R ℜ Z ℨ")];
const ALPHABETS = new Map([
  ["mathbb", DOUBLE_STRUCK],
  ["Bbb", DOUBLE_STRUCK],
  ["mathcal", SCRIPT],
  ["mathscr", SCRIPT],
  ["mathfrak", FRAKTUR],
]);
const TEXTS = table(`
  text plain textrm plain textnormal plain mbox plain mathrm plain textup plain rm plain textbf bold
  textit italic mathit italic texttt mono mathtt mono textsf plain mathsf plain mathbf bold`);
const CENTRED = names("matrix smallmatrix array gather gather* gathered equation equation*");
const ALIGNED = names("align align* aligned alignedat split eqnarray eqnarray*");
const ENVIRONMENTS = new Map([
  ...[...CENTRED].map((name) => [name, ["", "", "centred"]]),
  ...[...ALIGNED].map((name) => [name, ["", "", "aligned"]]),
  ["pmatrix", ["(", ")", "centred"]],
  ["bmatrix", ["[", "]", "centred"]],
  ["Bmatrix", ["{", "}", "centred"]],
  ["vmatrix", ["|", "|", "centred"]],
  ["Vmatrix", ["‖", "‖", "centred"]],
  ["cases", ["{", "", "cases"]],
]);
const WITHOUT_EFFECT = names(
  "displaystyle textstyle scriptstyle limits nolimits nonumber notag hline large Large small",
);
const TOKEN =
  /\\(?:[A-Za-z]+|[^])|\d{1,3}(?:\{,\}\d{3})+|[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d*\.?\d+|[^]/uy;
const WORDS = /\s*\{((?:[^{}$\\]|\\[\s%$&#_{},;])*)\}/y;

class NotUnderstood extends Error {}

function refuse() {
  throw new NotUnderstood();
}

// The element of a formula, or null. `budget.left` is the number of nodes that may still be made.
function formula(source, isDisplay, budget) {
  if (source.length > MAX_FORMULA || budget.left <= 0 || CONTROLS.test(source)) return null;
  const input = { source, at: 0, depth: 0, budget };
  try {
    const lines = cells(input, "");
    const isOne = lines.length === 1 && lines[0].length === 1;
    const nodes = isOne ? lines[0][0] : [tableOf(input, lines, "aligned")];
    if (!nodes.length) return null;
    return node(input, "math", { display: isDisplay ? "block" : null, title: source }, ...nodes);
  } catch (error) {
    if (error instanceof NotUnderstood) return null;
    throw error;
  }
}

function node({ budget }, tag, attributes, ...children) {
  if ((budget.left -= 1) < 0) refuse();
  return el(`math:${tag}`, attributes, ...children);
}

// The next token, behind spaces; "" at the end.
function peek(input) {
  while (/\s/.test(input.source[input.at] ?? "")) input.at += 1;
  TOKEN.lastIndex = input.at;
  return TOKEN.exec(input.source)?.[0] ?? "";
}

function next(input) {
  const token = peek(input);
  input.at += token.length;
  return token;
}

const skip = (input, token) => peek(input) === token && Boolean(next(input));

function expect(input, token) {
  if (next(input) !== token) refuse();
}

// The depth of groups and arguments in each other, which has a limit.
function descend(input) {
  if ((input.depth += 1) > MAX_DEPTH) refuse();
}

// What a pattern finds here, in its first group; undefined if it does not.
function read(input, pattern) {
  pattern.lastIndex = input.at;
  const found = pattern.exec(input.source);
  if (found) input.at = pattern.lastIndex;
  return found?.[1];
}

// A group in braces that is text; undefined if it is not.
function textGroup(input) {
  const plain = read(input, WORDS)?.replace(/\\([^])/g, "$1");
  return plain?.replace(/[\s~]/g, "\u00a0"); // MathML drops plain spaces
}

const words = (input) => textGroup(input) ?? refuse();

// Nodes up to one of the tokens `ends`, which is left.
function nodesUntil(input, ...ends) {
  const nodes = [];
  while (!ends.includes(peek(input))) {
    const isFraction = skip(input, "\\over");
    if (isFraction || skip(input, "\\choose")) {
      descend(input);
      const parts = [joined(input, nodes), joined(input, nodesUntil(input, ...ends))];
      input.depth -= 1;
      if (isFraction) return [node(input, "mfrac", {}, ...parts)];
      const inside = node(input, "mfrac", { linethickness: 0 }, ...parts);
      return [fence(input, "("), inside, fence(input, ")")];
    }
    const found = scripted(input);
    if (found) nodes.push(found);
  }
  return nodes;
}

// Nodes as one.
const joined = (input, nodes) =>
  nodes.length === 1 ? nodes[0] : node(input, "mrow", {}, ...nodes);

// Lines of cells up to the token `end`, which is left.
function cells(input, end) {
  const lines = [[]];
  for (;;) {
    lines.at(-1).push(nodesUntil(input, "&", "\\\\", end));
    if (peek(input) === end) break;
    if (next(input) === "&") continue;
    read(input, /\s*(\[[\d.]+ ?(?:pt|em|ex|mm|cm)\])/y);
    lines.push([]);
  }
  const last = lines.at(-1);
  return lines.length > 1 && last.length === 1 && !last[0].length ? lines.slice(0, -1) : lines;
}

function tableOf(input, lines, kind) {
  const rows = lines.map((line) =>
    node(input, "mtr", {}, ...line.map((nodes) => node(input, "mtd", {}, ...nodes))),
  );
  const displaystyle = kind === "aligned" ? "true" : null;
  return node(input, "mtable", { class: kind, displaystyle }, ...rows);
}

// An atom with its primes, subscript and superscript.
function scripted(input) {
  const base = atom(input);
  let primes = "",
    low = null,
    high = null;
  for (;;) {
    if (skip(input, "'")) primes += "′";
    else if (!low && skip(input, "_")) low = argument(input);
    else if (!high && skip(input, "^")) high = argument(input);
    else if (!skip(input, "\\limits") && !skip(input, "\\nolimits")) break;
  }
  if (primes) {
    const prime = node(input, "mo", { lspace: 0, rspace: 0 }, primes);
    high = high ? joined(input, [prime, high]) : prime;
  }
  if (!low && !high) return base;
  const tags = base?.hasAttribute("data-limits")
    ? { both: "munderover", low: "munder", high: "mover" }
    : { both: "msubsup", low: "msub", high: "msup" };
  const tag = low && high ? tags.both : low ? tags.low : tags.high;
  return node(input, tag, {}, base ?? joined(input, []), low, high);
}

// What a command or a script takes: a group, or a single sign or digit.
function argument(input) {
  const token = peek(input);
  if ("^_'".includes(token)) refuse(); // and at the end
  if (/^\d/.test(token)) {
    input.at += 1;
    return node(input, "mn", {}, token[0]);
  }
  return atom(input) ?? refuse();
}

// null for what is not seen.
function atom(input) {
  if ("^_'".includes(peek(input)) && peek(input)) return null; // a script without a base
  descend(input);
  const found = atomOf(input, next(input));
  input.depth -= 1;
  return found;
}

function atomOf(input, token) {
  if ("}&$".includes(token)) refuse(); // and at the end
  if (token === "{") {
    const nodes = nodesUntil(input, "}");
    expect(input, "}");
    return joined(input, nodes);
  }
  if (token === "~") return node(input, "mspace", { width: SPACES.get(" ") });
  if (/\d$/.test(token)) return node(input, "mn", {}, token.replaceAll("{,}", ","));
  if (/^\p{L}$/u.test(token)) return node(input, "mi", {}, token);
  if (FENCES.has(token) && token !== "<" && token !== ">")
    return fence(input, FENCES.get(token), { stretchy: "false" });
  if (token.length > 1 && token.startsWith("\\")) return command(input, token.slice(1));
  if ('./?"@%#\\…'.includes(token)) return upright(input, token);
  return node(input, "mo", {}, OPERATORS.get(token) ?? token);
}

const upright = (input, text, attributes) =>
  node(input, "mi", { mathvariant: "normal", ...attributes }, text);
// A bar may be the first or the second of two, so the browser cannot know its space.
const fence = (input, text, attributes) => {
  const space = "|‖/".includes(text) ? { lspace: 0, rspace: 0 } : {};
  return node(input, "mo", { ...attributes, ...space }, text);
};
const functionName = (input, name) => {
  const rspace = "({[^_|".includes(peek(input)) ? 0 : "0.167em";
  return node(input, "mo", { lspace: "0.167em", rspace }, name);
};

function command(input, name) {
  if (LETTERS.has(name)) return node(input, "mi", {}, LETTERS.get(name));
  if (ORDINARY.has(name)) return upright(input, ORDINARY.get(name));
  if (OPERATORS.has(name)) return node(input, "mo", {}, OPERATORS.get(name));
  if (FUNCTIONS.has(name)) return functionName(input, name);
  if (LIMITS.has(name)) return limits(input, LIMITS.get(name));
  if (SPACES.has(name)) return node(input, "mspace", { width: SPACES.get(name) });
  if (WITHOUT_EFFECT.has(name)) return null;
  if (TEXTS.has(name)) return styled(input, TEXTS.get(name));
  if (ALPHABETS.has(name)) return alphabet(input, ...ALPHABETS.get(name));
  if (LINES.has(name)) return node(input, "mrow", { class: LINES.get(name) }, argument(input));
  if (ACCENTS.has(name)) return accented(input, ACCENTS.get(name), name.length > 5);
  const size = name.match(/^([bB]igg?)[lrm]?$/)?.[1];
  if (size) return delimiter(input, { minsize: SIZES.get(size), maxsize: SIZES.get(size) });
  return COMMANDS.get(name)?.(input) ?? refuse();
}

const limits = (input, text) =>
  node(input, "mo", { movablelimits: "true", "data-limits": "" }, text);

// Text, or a group of formulas, upright, bold, ...
function styled(input, kind) {
  const text = textGroup(input);
  if (text === undefined) return node(input, "mrow", { class: kind }, argument(input));
  return node(input, "mtext", { class: kind }, text);
}

function alphabet(input, first, others) {
  const place = (letter) => parseInt(letter, 36) - 10 + (letter > "Z" ? 26 : 0);
  const text = read(input, /\s*(\{\s*[A-Za-z]+\s*\}|[A-Z])/y) ?? refuse();
  const letters = text.match(/[A-Za-z]/g);
  const found = letters.map((a) => others.get(a) ?? String.fromCodePoint(first + place(a)));
  return upright(input, found.join(""));
}

function accented(input, accent, isWide) {
  const mark = node(input, "mo", { stretchy: String(isWide) }, accent);
  return node(input, "mover", { accent: "true" }, argument(input), mark);
}

// The parenthesis or bar after \left, \right, \middle, \big; none for a point.
function delimiter(input, attributes) {
  const token = next(input);
  if (token === ".") return null;
  return fence(input, FENCES.get(token) ?? refuse(), { stretchy: "true", ...attributes });
}

function fraction(input, attributes) {
  return node(input, "mfrac", attributes, argument(input), argument(input));
}

function binomial(input, attributes) {
  const inside = fraction(input, { linethickness: 0, ...attributes });
  return node(input, "mrow", {}, fence(input, "("), inside, fence(input, ")"));
}

function root(input) {
  if (!skip(input, "[")) return node(input, "msqrt", {}, argument(input));
  const index = joined(input, nodesUntil(input, "]"));
  expect(input, "]");
  return node(input, "mroot", {}, argument(input), index);
}

function stacked(input, tag) {
  const added = argument(input);
  return node(input, tag, {}, argument(input), added);
}

function arrow(input) {
  const sign = node(input, "mo", { stretchy: "true" }, "→");
  return node(input, "mover", {}, sign, argument(input));
}

function brace(input, tag, sign) {
  const mark = node(input, "mo", { stretchy: "true" }, sign);
  return node(input, tag, { "data-limits": "" }, argument(input), mark);
}

function between(input) {
  const first = delimiter(input);
  const nodes = nodesUntil(input, "\\right");
  expect(input, "\\right");
  return node(input, "mrow", {}, first, ...nodes, delimiter(input));
}

function environment(input) {
  const name = words(input);
  const [first, last, kind] = ENVIRONMENTS.get(name) ?? refuse();
  if (name === "array" || name === "alignedat") words(input); // columns, or their number
  const inside = tableOf(input, cells(input, "\\end"), kind);
  expect(input, "\\end");
  if (words(input) !== name) refuse();
  if (!first) return inside;
  return node(
    input,
    "mrow",
    {},
    fence(input, first, { form: "prefix" }),
    inside,
    last && fence(input, last, { form: "postfix" }),
  );
}

function negated(input) {
  const found = argument(input);
  if (found.localName !== "mo") refuse();
  found.append("\u0338");
  return found;
}

const COMMANDS = new Map([
  ["frac", (input) => fraction(input, {})],
  ["cfrac", (input) => fraction(input, { displaystyle: "true" })],
  ["dfrac", (input) => fraction(input, { displaystyle: "true" })],
  ["tfrac", (input) => fraction(input, { displaystyle: "false" })],
  ["binom", (input) => binomial(input, {})],
  ["dbinom", (input) => binomial(input, { displaystyle: "true" })],
  ["tbinom", (input) => binomial(input, { displaystyle: "false" })],
  ["sqrt", root],
  ["left", between],
  ["middle", delimiter],
  ["begin", environment],
  ["not", negated],
  ["overset", (input) => stacked(input, "mover")],
  ["stackrel", (input) => stacked(input, "mover")],
  ["underset", (input) => stacked(input, "munder")],
  ["overbrace", (input) => brace(input, "mover", "⏞")],
  ["underbrace", (input) => brace(input, "munder", "⏟")],
  ["boldsymbol", (input) => node(input, "mrow", { class: "bold" }, argument(input))],
  ["bm", (input) => node(input, "mrow", { class: "bold" }, argument(input))],
  [
    "operatorname",
    (input) =>
      skip(input, "*") ? limits(input, words(input)) : functionName(input, words(input)),
  ],
  ["pmod", (input) => node(input, "mrow", {}, ...modulus(input))],
  ["tag", (input) => node(input, "mtext", {}, `\u2003(${words(input)})`)],
  ["xrightarrow", arrow],
]);

const modulus = (input) => [
  node(input, "mtext", {}, "\u2003(mod\u00a0"),
  argument(input),
  node(input, "mtext", {}, ")"),
];
