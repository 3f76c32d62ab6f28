// The data, the views by their address (#curves/...), light and dark, and live updates.

const data = JSON.parse(byId("data").textContent);
const VIEWS = {
  overview: { title: "Overview", view: overviewView },
  curves: { title: "Curves", view: curvesView },
  time: { title: "Time", view: timesView },
  rollouts: { title: "Rollouts", view: rolloutsView },
  sample: { view: rolloutsView }, // #sample/RUN/NAME/PLACE: the browser with this sample open
  group: { view: groupsView, tab: "rollouts" }, // #group/RUN/NAME/PLACE: with the group of this sample
};
const POLL_MS = 2000;

function route() {
  const [name, ...parts] = location.hash
    .slice(1)
    .split("/")
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  return { name: Object.hasOwn(VIEWS, name) ? name : "overview", parts };
}

function show() {
  const { name, parts } = route();
  byId("tabs").replaceChildren(
    ...Object.entries(VIEWS)
      .filter(([, v]) => v.title)
      .map(([key, v]) =>
        el(
          "a",
          {
            href: "#" + key,
            class: v.view === VIEWS[name].view || key === VIEWS[name].tab ? "chosen" : "",
          },
          v.title,
        ),
      ),
  );
  byId("main").replaceChildren(...VIEWS[name].view(...parts).filter(Boolean));
}

let isUpdating = false;

// Draws the view anew where the reader is.
function update() {
  const before = scrollY;
  isUpdating = true;
  show();
  isUpdating = false;
  scrollTo(0, before);
}

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.style.colorScheme = theme;
}

// Adds what a run has recorded since the last time; a resumed run starts anew.
function addNews(run, news) {
  if (news.restarts !== run.restarts) return location.reload();
  const before = run.metrics.step.length,
    now = before + news.metrics.step.length;
  for (const name of new Set([...Object.keys(run.metrics), ...Object.keys(news.metrics)])) {
    const old = run.metrics[name] || Array(before).fill(null);
    run.metrics[name] = old.concat(news.metrics[name] || Array(now - before).fill(null));
  }
  Object.assign(run, {
    overview: news.overview,
    notes: news.notes,
    names: news.names,
    events: news.events,
    meanings: { ...run.meanings, ...news.meanings },
  });
}

async function poll() {
  try {
    let isNew = false;
    for (const [i, run] of data.runs.entries()) {
      const response = await fetch(`news?run=${i}&rows=${run.metrics.step.length}`);
      const news = await response.json();
      isNew ||= news.metrics.step.length > 0 || news.names.length !== run.names.length;
      addNews(run, news);
    }
    byId("status").textContent = `live, ${new Date().toLocaleTimeString()}`;
    if (
      isNew &&
      ["overview", "curves"].includes(route().name) &&
      document.activeElement?.tagName !== "INPUT"
    )
      update();
  } catch {
    byId("status").textContent = "the server has ended; this is its last state";
  }
  setTimeout(poll, POLL_MS);
}

chooseTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () =>
  chooseTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
);
addEventListener("hashchange", show);
byId("status").textContent = data.live
  ? "live"
  : `written ${new Date(data.written * 1000).toLocaleString()}`;
show();
if (data.live) setTimeout(poll, POLL_MS);
