// Curves as SVG: axes, smoothing, hover. A series is {name, color, points: [[x, y], ...]}.

const HEIGHT = 180,
  RIGHT = 12,
  TOP = 8,
  BOTTOM = 20,
  LEAST_LEFT = 40, // has room for the name of the x axis
  CHARACTER = 6.5; // pixels of a digit of 11 px
const COLORS = [
  "#2f7ed8",
  "#e4572e",
  "#2a9d55",
  "#9b5de5",
  "#c98a00",
  "#0aa5a5",
  "#d6418f",
  "#7a7f87",
];
const SMALL_SHARE = 0.1;
const color = (index) => COLORS[index % COLORS.length];

// Exponential moving average, corrected for its start.
function smoothed(points, weight) {
  let sum = 0,
    total = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + y;
    total = weight * total + 1;
    return [x, sum / total];
  });
}

// Round numbers from `low` to `high`, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high * (1 + 1e-12) + step * 1e-9; i++)
    found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  const every = Math.ceil((Math.log10(high) - Math.log10(low)) / 6) || 1;
  for (let e = Math.ceil(Math.log10(low) - 1e-9); e <= Math.log10(high) + 1e-9; e += every)
    found.push(10 ** e);
  return found.length > 1 ? found : [low, high];
}

function range(values, { log = false, margin = 0.04 } = {}) {
  let low = Infinity,
    high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low === high)
    return log
      ? [low / 2, high * 2]
      : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const more = log ? 0 : (high - low) * margin;
  return [low - more, high + more];
}

// From 0 to 1; small shares, which would be a line along the axis, from 0 to the highest.
function shareRange(values) {
  if (values.some((value) => value < 0 || value > 1)) return range(values);
  const high = values.reduce((most, value) => Math.max(most, value), 0);
  return [0, high === 0 || high > SMALL_SHARE ? 1 : high * 1.04];
}

// A function from values to places, with its ticks.
function scale([low, high], [from, to], { log = false, count = 5 } = {}) {
  const f = log ? Math.log10 : (x) => x;
  const place = (x) => from + ((f(x) - f(low)) / (f(high) - f(low))) * (to - from);
  return { place, ticks: log ? logTicks(low, high) : ticks(low, high, count) };
}

function path(points, x, y, attributes) {
  const d = points
    .map(([a, b], i) => `${i ? "L" : "M"}${x.place(a).toFixed(1)} ${y.place(b).toFixed(1)}`)
    .join("");
  return el("svg:path", { d, fill: "none", ...attributes });
}

const tickText = (t) => number(Number(t.toPrecision(8)));

function axes(x, y, xLabel, left, right) {
  const nodes = [];
  for (const t of y.ticks) {
    const at = y.place(t);
    nodes.push(el("svg:line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
    nodes.push(el("svg:text", { x: left - 5, y: at + 4, "text-anchor": "end" }, tickText(t)));
  }
  for (const t of x.ticks) {
    const isAtEnd = x.place(t) + (tickText(t).length * CHARACTER) / 2 > right + RIGHT;
    const at = { x: isAtEnd ? right + RIGHT : x.place(t), y: HEIGHT - 5 };
    nodes.push(
      el("svg:text", { ...at, "text-anchor": isAtEnd ? "end" : "middle" }, tickText(t)),
    );
  }
  nodes.push(el("svg:text", { x: 0, y: HEIGHT - 5 }, xLabel));
  return nodes;
}

// The point of a series with the least distance: raw and smoothed.
function nearestPoint(series, distance) {
  const i = series.raw.reduce(
    (best, point, j) => (distance(point) < distance(series.raw[best]) ? j : best),
    0,
  );
  return { series, x: series.raw[i][0], y: series.raw[i][1], smooth: series.points[i][1] };
}

// The svg of the series, in pixels, and, if needed, a note. Calls hover(x, values) with the nearest
// point of each.
function chart(
  series,
  width,
  {
    log = false,
    smooth = 0,
    xLabel = "step",
    isShare = false,
    hover = () => {},
    click = null,
  },
) {
  const drawn = series.map((s) => {
    const points = s.points.filter(([, y]) => Number.isFinite(y) && (!log || y > 0));
    return { ...s, raw: points, points: smooth ? smoothed(points, smooth) : points };
  });
  const left_out = series.reduce((n, s, i) => n + s.points.length - drawn[i].raw.length, 0);
  const all = drawn.flatMap((s) => s.raw);
  const note = left_out
    ? `${left_out} values not shown (${log ? "0, negative or " : ""}not finite)`
    : "";
  if (!all.length) return { svg: el("svg:svg"), note: note || "no values" };
  const values = all.map((p) => p[1]);
  const y = scale(
    isShare && !log ? shareRange(values) : range(values, { log }),
    [HEIGHT - BOTTOM, TOP],
    { log },
  );
  const longest = Math.max(...y.ticks.map((t) => tickText(t).length));
  const left = Math.max(LEAST_LEFT, longest * CHARACTER + 8),
    right = width - RIGHT;
  const x = scale(range(all.map((p) => p[0]), { margin: 0 }), [left, right], {
    count: Math.max(2, width / 80),
  });
  const cursor = el("svg:g");
  const svg = el(
    "svg:svg",
    { width, height: HEIGHT, role: "img" },
    axes(x, y, xLabel, left, right),
  );
  for (const s of drawn) {
    if (smooth) svg.append(path(s.raw, x, y, { stroke: s.color, "stroke-opacity": 0.25 }));
    svg.append(path(s.points, x, y, { stroke: s.color, "stroke-width": 1.6 }));
    if (s.points.length < 40)
      for (const p of s.points)
        svg.append(el("svg:circle", { cx: x.place(p[0]), cy: y.place(p[1]), r: 2, fill: s.color }));
  }
  svg.append(cursor);
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const at = event.clientX - box.left;
    return drawn
      .filter((s) => s.raw.length)
      .map((s) => nearestPoint(s, (point) => Math.abs(x.place(point[0]) - at)));
  };
  svg.addEventListener("pointermove", (event) => {
    const found = nearest(event);
    cursor.replaceChildren(
      ...found.flatMap((p) => [
        el("svg:line", {
          class: "cursor",
          x1: x.place(p.x),
          x2: x.place(p.x),
          y1: TOP,
          y2: HEIGHT - BOTTOM,
        }),
        el("svg:circle", { cx: x.place(p.x), cy: y.place(p.smooth), r: 3.5, fill: p.series.color }),
      ]),
    );
    hover(found);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.replaceChildren();
    hover([]);
  });
  if (click) svg.addEventListener("click", (event) => click(nearest(event)));
  return { svg, note };
}
