// Curves as SVG: axes, smoothing, hover. A series is {name, color, points: [[x, y], ...]}.

const WIDTH = 420,
  HEIGHT = 180,
  LEFT = 46,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 20;
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

function range(values, log) {
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
  const margin = log ? 0 : (high - low) * 0.04;
  return [low - margin, high + margin];
}

// A function from values to places, with its ticks.
function scale([low, high], [from, to], log) {
  const f = log ? Math.log10 : (x) => x;
  const place = (x) => from + ((f(x) - f(low)) / (f(high) - f(low))) * (to - from);
  return { place, ticks: log ? logTicks(low, high) : ticks(low, high, 5) };
}

function path(points, x, y, attributes) {
  const d = points
    .map(([a, b], i) => `${i ? "L" : "M"}${x.place(a).toFixed(1)} ${y.place(b).toFixed(1)}`)
    .join("");
  return el("svg:path", { d, fill: "none", ...attributes });
}

const tickText = (t) => number(Number(t.toPrecision(8)));

function axes(x, y, xLabel) {
  const nodes = [];
  for (const t of y.ticks) {
    const at = y.place(t);
    nodes.push(el("svg:line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    nodes.push(el("svg:text", { x: LEFT - 4, y: at + 3, "text-anchor": "end" }, tickText(t)));
  }
  for (const t of x.ticks)
    nodes.push(
      el("svg:text", { x: x.place(t), y: HEIGHT - 6, "text-anchor": "middle" }, tickText(t)),
    );
  nodes.push(el("svg:text", { x: LEFT - 18, y: HEIGHT - 6, "text-anchor": "end" }, xLabel));
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

// The svg of the series and, if needed, a note. Calls hover(x, values) with the nearest point of each.
function chart(
  series,
  { log = false, smooth = 0, xLabel = "step", hover = () => {}, click = null },
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
  const x = scale(range(all.map((p) => p[0])), [LEFT, WIDTH - RIGHT]);
  const y = scale(
    range(
      all.map((p) => p[1]),
      log,
    ),
    [HEIGHT - BOTTOM, TOP],
    log,
  );
  const cursor = el("svg:g");
  const svg = el("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, axes(x, y, xLabel));
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
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
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
