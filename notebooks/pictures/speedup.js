// The speed-up S = tau / (v + K c), with sliders. Times are in plain steps of the target.
// speedup(element, {tau, v, c, K, title}): the values at the start.
function speedup(place, start) {
  place.innerHTML = `<style>
  .e3-speedup { color-scheme: light dark; --ink: light-dark(#1f2328, #e6edf3); --faint: light-dark(#d0d7de, #3d444d);
    --plain: light-dark(#9aa0a6, #7d858d); --verify: light-dark(#2f6fae, #6cb0f0); --draft: light-dark(#d97634, #f0a06a);
    background: light-dark(#fff, #161b22); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; padding: .8em;
    border-radius: 6px; max-width: 760px; box-sizing: border-box }
  [data-theme="light"] .e3-speedup, [data-jp-theme-light="true"] .e3-speedup { color-scheme: light }
  [data-theme="dark"] .e3-speedup, [data-jp-theme-light="false"] .e3-speedup { color-scheme: dark }
  .e3-speedup .sliders { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .2em 1.2em;
    align-items: end }
  .e3-speedup label { display: block } .e3-speedup input { width: 100%; margin: 0 }
  .e3-speedup svg { display: block; width: 100%; max-width: none; height: 132px; margin-top: .6em; overflow: visible }
  .e3-speedup text { fill: var(--ink); font: 12px system-ui, sans-serif }
  .e3-speedup p { margin: .3em 0 0 } .e3-speedup output { font-weight: 600; font-variant-numeric: tabular-nums }
  .e3-speedup .result { font-size: 17px }
  </style><div class="e3-speedup" role="group"><b></b>
  <div class="sliders">
    <label>τ, tokens per round <output name="tau-shown"></output>
      <input type="range" name="tau" min="1" max="11" step="0.05"></label>
    <label>v, verification <output name="v-shown"></output>
      <input type="range" name="v" min="1" max="6" step="0.05"></label>
    <label>c, one draft step <output name="c-shown"></output>
      <input type="range" name="c" min="0" max="0.5" step="0.005"></label>
    <label>K, draft length <output name="K-shown"></output>
      <input type="range" name="K" min="1" max="10" step="1"></label>
  </div>
  <svg role="img"></svg>
  <p class="result">S = τ / (v + K c) = <output name="ratio"></output> = <output name="speedup"></output></p>
  <p class="verdict" aria-live="polite"></p></div>`;

  const root = place.querySelector(".e3-speedup");
  const svg = root.querySelector("svg");
  const field = name => root.querySelector(`[name="${name}"]`);
  const names = ["tau", "v", "c", "K"];
  const digits = { tau: 2, v: 2, c: 3, K: 0 };
  root.querySelector("b").textContent = start.title || "";
  root.setAttribute("aria-label", start.title || "speed-up of speculative decoding");
  for (const name of names) field(name).value = start[name];

  function add(parent, name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return parent.appendChild(element);
  }

  function draw() {
    // A round adds at least one token, and at most K + 1.
    field("tau").max = Number(field("K").value) + 1;
    const [tau, v, c, K] = names.map(name => Number(field(name).value));
    for (const name of names) field(`${name}-shown`).value = Number(field(name).value).toFixed(digits[name]);
    const round = v + K * c;
    const gain = tau / round;
    field("ratio").value = `${tau.toFixed(2)} / ${round.toFixed(2)}`;
    field("speedup").value = gain.toFixed(2);
    root.querySelector(".verdict").textContent = gain < 1
      ? "Slower than plain decoding: a round costs more plain steps than it adds tokens."
      : `A round costs ${round.toFixed(2)} plain steps. It pays off if it adds more than ${round.toFixed(2)} tokens.`;

    const width = svg.clientWidth || 700;
    const scale = (width - 2) / Math.max(tau, round);
    svg.setAttribute("viewBox", `0 0 ${width} 132`);
    svg.replaceChildren();
    add(svg, "title", {}, "time of plain decoding and of one round for the same number of tokens");
    const bar = (x, y, length, color) => add(svg, "rect", { x: 1 + x * scale, y, height: 26, rx: 2,
      width: Math.max(length * scale - 1, 0.6), fill: color });
    add(svg, "text", { x: 1, y: 12 }, `plain decoding: ${tau.toFixed(2)} tokens in ${tau.toFixed(2)} steps`);
    for (let step = 0; step < tau; step++) bar(step, 18, Math.min(1, tau - step), "var(--plain)");
    add(svg, "text", { x: 1, y: 68 }, `one round: ${tau.toFixed(2)} tokens in ${round.toFixed(2)} steps`);
    for (let step = 0; step < K; step++) bar(step * c, 74, c, "var(--draft)");
    bar(K * c, 74, v, "var(--verify)");
    const key = [["var(--draft)", `${K} draft ${K === 1 ? "step" : "steps"}`], ["var(--verify)", "verification"]];
    key.forEach(([color, words], index) => {
      add(svg, "rect", { x: 1 + 120 * index, y: 114, width: 11, height: 11, rx: 2, fill: color });
      add(svg, "text", { x: 17 + 120 * index, y: 124 }, words);
    });
  }

  for (const input of root.querySelectorAll("input")) input.addEventListener("input", draw);
  new ResizeObserver(draw).observe(svg);
  draw();
}
