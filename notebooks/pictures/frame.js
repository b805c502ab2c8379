// The frame of a picture of draft trees: a title, a slider from 0 to `last` between two buttons, a caption, and `content`.
// `draw(index)` is called for every position.
function framed(place, { name, title, last, content, draw }) {
  place.innerHTML = `<style>
  .e3-tree { color-scheme: light dark; --ink: light-dark(#1f2328, #e6edf3); --line: light-dark(#d0d7de, #3d444d);
    --bg: light-dark(#fff, #161b22); --accepted: light-dark(#1f8a64, #3fb98b); --rejected: light-dark(#b84a80, #e08ab5);
    --corrected: light-dark(#b9591c, #f0a06a); --bonus: light-dark(#2f6fae, #6cb0f0); --muted: light-dark(#6b7280, #9aa4af);
    --unvisited: var(--muted); background: var(--bg); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; padding: .8em;
    border-radius: 6px; box-sizing: border-box }
  [data-theme="light"] .e3-tree, [data-jp-theme-light="true"] .e3-tree { color-scheme: light }
  [data-theme="dark"] .e3-tree, [data-jp-theme-light="false"] .e3-tree { color-scheme: dark }
  .e3-tree nav { display: flex; gap: .6em; align-items: center; margin: .5em 0; max-width: 740px }
  .e3-tree nav input { flex: 1; min-width: 0 }
  .e3-tree button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 4px;
    padding: .1em .6em; cursor: pointer }
  .e3-tree button:disabled { opacity: .4 }
  .e3-tree p { margin: .2em 0 }
  .e3-tree .scroll { overflow-x: auto }
  .e3-tree .legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; color: var(--muted) }
  .e3-tree .key { display: inline-flex; align-items: center; gap: .3em }
  .e3-tree svg { display: block; max-width: none }
  .e3-tree text { fill: var(--ink); font: 12.5px ui-monospace, monospace; paint-order: stroke; stroke: var(--bg); stroke-width: 3px }
  .e3-tree text.note { font-size: 10.5px } .e3-tree text.below { fill: var(--muted) }
  .e3-tree text.words { font: 12px system-ui, sans-serif }
  </style><div class="e3-tree e3-${name}" role="group"><b></b>
  <nav><button type="button" name="back">Back</button><input type="range" name="step" min="0" max="${last}" step="1" value="0"
    aria-label="step"><button type="button" name="next">Next</button></nav>
  <p class="caption" aria-live="polite"></p>${content}</div>`;

  const root = place.querySelector(".e3-tree");
  const slider = root.querySelector("input");
  const [back, next] = root.querySelectorAll("button");
  root.querySelector("b").textContent = title;
  root.setAttribute("aria-label", title);

  function redraw() {
    back.disabled = Number(slider.value) === 0;
    next.disabled = Number(slider.value) === last;
    draw(root, Number(slider.value));
  }

  function turn(change) {
    slider.value = Number(slider.value) + change;
    redraw();
  }

  slider.addEventListener("input", redraw);
  back.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  new ResizeObserver(redraw).observe(root);
  redraw();
}
