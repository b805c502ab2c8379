// The acceptance rule for one token, with sliders. The target has a distribution p, the drafter a distribution q.
// acceptance(element, {labels, target, drafter, title}): texts and logits of a few tokens.
// At error e the drafter's logits are target + e * (drafter - target), so 0 is the target and 1 is the drafter.
function acceptance(place, { labels, target, drafter, title }) {
  place.innerHTML = `<style>
  .e3-acceptance { color-scheme: light dark; --ink: light-dark(#1f2328, #e6edf3); --faint: light-dark(#d0d7de, #3d444d);
    --target: light-dark(#2f6fae, #6cb0f0); --drafter: light-dark(#b9591c, #f0a06a); --accepted: light-dark(#2a9d74, #3fb98b);
    --residual: light-dark(#6a5fc0, #a89df0); --rejected: light-dark(#c05a8e, #e08ab5);
    background: light-dark(#fff, #161b22); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; padding: .8em;
    border-radius: 6px; max-width: 760px; box-sizing: border-box }
  [data-theme="light"] .e3-acceptance, [data-jp-theme-light="true"] .e3-acceptance { color-scheme: light }
  [data-theme="dark"] .e3-acceptance, [data-jp-theme-light="false"] .e3-acceptance { color-scheme: dark }
  .e3-acceptance .sliders { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .2em 1.2em;
    align-items: end }
  .e3-acceptance label { display: block } .e3-acceptance input { width: 100%; margin: 0 }
  .e3-acceptance .key { display: flex; flex-wrap: wrap; gap: .1em 1em; font-size: 13px; margin: .4em 0 }
  .e3-acceptance .key i { display: inline-block; width: .9em; height: .9em; margin-right: .35em; border-radius: 2px;
    vertical-align: -.1em; border: 2px solid transparent; box-sizing: border-box }
  .e3-acceptance svg { display: block; width: 100%; max-width: none; height: 240px; overflow: visible }
  .e3-acceptance text { fill: var(--ink); font: 12px ui-monospace, monospace }
  .e3-acceptance p { margin: .4em 0 0 } .e3-acceptance output { font-weight: 600; font-variant-numeric: tabular-nums }
  .e3-acceptance button { font: inherit; color: inherit; background: none; border: 1px solid var(--faint); border-radius: 4px;
    padding: .1em .6em; cursor: pointer }
  </style><div class="e3-acceptance" role="group"><b></b>
  <div class="sliders">
    <label>temperature <output name="temperature-shown"></output>
      <input type="range" name="temperature" min="0.2" max="2" step="0.05" value="1"></label>
    <label>top-p of the target <output name="top_p-shown"></output>
      <input type="range" name="top_p" min="0.1" max="1" step="0.01" value="1"></label>
    <label>error of the drafter <output name="error-shown"></output>
      <input type="range" name="error" min="0" max="2" step="0.05" value="1"></label>
  </div>
  <div class="key">
    <span><i style="border-color:var(--target)"></i>left bar: p, the target</span>
    <span><i style="border-color:var(--drafter)"></i>right bar: q, the drafter</span>
    <span><i style="background:var(--accepted)"></i>accepted: min(p, q)</span>
    <span><i style="background:var(--rejected)"></i>rejected: q above p</span>
    <span><i style="background:repeating-linear-gradient(45deg, var(--residual) 0 2px, transparent 2px 4px)"></i>residual: p above q</span>
    <span class="ticks" hidden><i style="background:var(--ink);height:3px;vertical-align:.2em"></i>sampled by the rule</span>
  </div>
  <svg role="img"></svg>
  <p>accepted <output name="accepted"></output> + residual <output name="residual"></output> =
     <output name="sum"></output>, all of p. Rejected: <output name="rejected"></output>, as much as the residual.</p>
  <p><button type="button">Sample 500 tokens by the rule</button> <span class="counted"></span></p></div>`;

  const root = place.querySelector(".e3-acceptance");
  const svg = root.querySelector("svg");
  const field = name => root.querySelector(`[name="${name}"]`);
  const sum = values => values.reduce((total, value) => total + value, 0);
  root.querySelector("b").textContent = title || "";
  root.setAttribute("aria-label", title || "acceptance rule for one token");

  function softmax(logits, temperature) {
    const most = Math.max(...logits);
    const weights = logits.map(logit => Math.exp((logit - most) / temperature));
    return weights.map(weight => weight / sum(weights));
  }

  // Keeps the most likely tokens until their mass reaches top-p, as in Hugging Face transformers.
  function nucleus(p, topP) {
    const order = p.map((_, token) => token).sort((a, b) => p[b] - p[a]);
    let before = 0;
    const kept = p.map(() => 0);
    for (const token of order) {
      if (before < topP || topP >= 1) kept[token] = p[token];
      before += p[token];
    }
    return kept.map(mass => mass / sum(kept));
  }

  function add(parent, name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return parent.appendChild(element);
  }

  let p, q, counts;

  function change() {
    const [temperature, topP, error] = ["temperature", "top_p", "error"].map(name => Number(field(name).value));
    for (const name of ["temperature", "top_p", "error"]) field(`${name}-shown`).value = Number(field(name).value).toFixed(2);
    p = nucleus(softmax(target, temperature), topP);
    q = softmax(target.map((logit, token) => logit + error * (drafter[token] - logit)), temperature);
    counts = null;
    draw();
  }

  // Drafts a token from q, keeps it with probability min(1, p / q), and otherwise samples from the residual.
  function sampleOne() {
    const draftToken = choose(q);
    if (Math.random() * q[draftToken] < p[draftToken]) return draftToken;
    return choose(p.map((mass, token) => Math.max(mass - q[token], 0)));
  }

  function choose(weights) {
    let remaining = Math.random() * sum(weights);
    for (let token = 0; token < weights.length; token++) {
      remaining -= weights[token];
      if (remaining < 0) return token;
    }
    return weights.findLastIndex(weight => weight > 0);
  }

  function draw() {
    const accepted = p.map((mass, token) => Math.min(mass, q[token]));
    const left = p.map((mass, token) => Math.max(mass - q[token], 0));
    const rejected = q.map((mass, token) => Math.max(mass - p[token], 0));
    const shown = { accepted: sum(accepted), residual: sum(left), rejected: sum(rejected), sum: sum(accepted) + sum(left) };
    for (const [name, value] of Object.entries(shown)) field(name).value = value.toFixed(3);

    const width = svg.clientWidth || 700, height = 240, base = height - 26, high = base - 14;
    const most = Math.max(...p, ...q), group = width / labels.length, bar = Math.min(group * 0.36, 34);
    const y = mass => base - high * mass / most;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    add(svg, "title", {}, "p and q as bars, divided into the accepted part, the rejected part of q and the residual of p");
    const hatch = add(add(svg, "defs", {}), "pattern", { id: "e3-hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" });
    add(hatch, "rect", { width: 5, height: 5, fill: "var(--residual)", opacity: 0.45 });
    add(hatch, "rect", { width: 2, height: 5, fill: "var(--residual)" });
    labels.forEach((label, token) => {
      const middle = group * (token + 0.5);
      const g = add(svg, "g", { "data-token": token, "data-p": p[token], "data-q": q[token],
        "data-accepted": accepted[token], "data-residual": left[token] });
      add(g, "title", {}, `${label}: p ${p[token].toFixed(3)}, q ${q[token].toFixed(3)}`);
      const box = (x, from, to, look) => add(g, "rect", { x, width: bar, y: y(to), height: Math.max(y(from) - y(to), 0), ...look });
      for (const x of [middle - bar - 1, middle + 1]) box(x, 0, accepted[token], { fill: "var(--accepted)" });
      box(middle - bar - 1, accepted[token], p[token], { fill: "url(#e3-hatch)" });
      box(middle + 1, accepted[token], q[token], { fill: "var(--rejected)", opacity: 0.75 });
      box(middle - bar - 1, 0, p[token], { fill: "none", stroke: "var(--target)", "stroke-width": 2 });
      box(middle + 1, 0, q[token], { fill: "none", stroke: "var(--drafter)", "stroke-width": 2 });
      if (counts) {
        const tick = y(counts[token] / sum(counts));
        add(g, "line", { x1: middle - bar - 6, x2: middle + 1, y1: tick, y2: tick, stroke: "var(--ink)", "stroke-width": 3 });
      }
      const room = Math.max(Math.floor(group / 7.6), 2);
      add(g, "text", { x: middle, y: base + 17, "text-anchor": "middle" },
        label.length > room ? label.slice(0, room - 1) + "…" : label);
    });
    add(svg, "line", { x1: 0, x2: width, y1: base, y2: base, stroke: "var(--faint)" });
    root.querySelector(".ticks").hidden = !counts;
    root.querySelector(".counted").textContent = counts ? `${sum(counts)} tokens: their frequencies approach p` : "";
  }

  for (const input of root.querySelectorAll("input")) input.addEventListener("input", change);
  root.querySelector("button").addEventListener("click", () => {
    counts ??= p.map(() => 0);
    for (let i = 0; i < 500; i++) counts[sampleOne()]++;
    draw();
  });
  new ResizeObserver(draw).observe(svg);
  change();
}
