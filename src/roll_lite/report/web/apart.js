// The page of `roll-lite bisect`: where two runs go apart, and the two samples side by side.

const data = JSON.parse(byId("data").textContent);

function tokensApart(run, readout) {
  const found = tokens(run.sample);
  const shade = shadeOf(found);
  const nodes = found.map((token) => tokenNode(run, token, shade, readout));
  if (data.token !== null && data.token >= nodes.length) nodes.push(el("span", { class: "token" }, "⟨end⟩"));
  if (data.token !== null) nodes[data.token]?.classList.add("apart");
  return el("div", { class: "text tokens" }, nodes);
}

function apartColumn(run, name) {
  const readout = el("div", { class: "readout" }, "point at a token, or tap it");
  return el(
    "div",
    { class: "side" },
    el("h2", {}, `${name}: `, safeText(run.name)),
    facts(run.sample),
    el("h3", {}, "Tokens"),
    readout,
    tokensApart(run, readout),
    el("h3", {}, "Conversation"),
    conversation(run.sample),
    others(run.sample),
  );
}

byId("theme").remove();
byId("main").replaceChildren(
  textBlock(data.about),
  el(
    "div",
    { class: "sides" },
    data.runs.map((run, i) => apartColumn(run, "AB"[i])),
  ),
);
