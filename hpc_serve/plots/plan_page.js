// Draws the figures of a plan's page: chooses formula, context, batch and layouts. It computes no speed.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const W = 460, H = 320, LEFT = 62, RIGHT = 24, TOP = 14, BOTTOM = 40;
  const KINDS = ["expected", "ideal"];
  const CHARTS = {
    rate: { x: "batch", y: "rate", below: "requests at once" },
    time: { x: "batch", y: "tpot", below: "requests at once" },
    both: { x: "tpot", y: "rate", below: "ms between tokens of a request" },
  };
  const all = (name) => [...document.querySelectorAll(`input[name=${name}]`)];
  const number = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

  const choice = (box, type, value, words, series) => {
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, { type, name: box, value, checked: true });
    label.append(input, " ");
    if (series !== undefined) {
      const swatch = document.createElement("i");
      swatch.className = `swatch s${series}`;
      label.append(swatch, " ");
    }
    label.append(words);
    byId(box).append(label);
  };

  data.formulas.forEach((one) => choice("formula", "radio", one.key, one.name));
  data.subjects.forEach((one, place) => choice("subject", "checkbox", place, one.name, place));
  all("formula").forEach((one) => { one.checked = one.value === data.formula; });
  all("kind").forEach((one) => { one.checked = one.value === "ideal" || !data.ideal; });
  byId("context").max = data.contexts.length - 1;
  byId("context").value = data.context;
  const grid = [...new Set(data.subjects.flatMap((one) => Object.values(one.curves).flat().flatMap((c) => c.batch)))]
    .sort((a, b) => a - b);
  byId("batch").max = grid.length - 1;
  byId("batch").value = Math.max(0, grid.findLastIndex((size) => size <= Math.max(data.batch, 16)));

  const chosen = () => {
    const formula = all("formula").find((one) => one.checked).value;
    const context = Number(byId("context").value);
    return {
      formula, context, batch: grid[Number(byId("batch").value)],
      kinds: all("kind").filter((one) => one.checked).map((one) => one.value),
      shown: all("subject").filter((one) => one.checked).map((one) => Number(one.value))
        .map((place) => ({ place, about: data.subjects[place], curve: data.subjects[place].curves[formula][context] })),
    };
  };
  // The point of a curve with the most requests at once that are no more than asked for.
  const pointOf = (curve, batch) => Math.max(0, curve.batch.findLastIndex((size) => size <= batch));
  const column = (curve, kind, name) => name === "batch" ? curve.batch : curve[kind][name];

  const make = (tag, attributes, words) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (words !== undefined) node.textContent = words;
    return node;
  };
  const ticks = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
      for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
    const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    return inside.length > 8 ? inside.filter((value) => String(value.toPrecision(1)).includes("1")) : inside;
  };
  const scale = (values, from, to) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (high / low < 1.5) { low /= 1.25; high *= 1.25; }
    const at = (value) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from);
    return { at, ticks: ticks(low, high), low, high };
  };

  const drawn = {};  // by chart: points on the page, for the pointer
  const draw = (id, state) => {
    const { x, y, below } = CHARTS[id], svg = byId(id), points = [];
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    svg.replaceChildren();
    for (const { place, about, curve } of state.shown)
      for (const kind of state.kinds)
        curve.batch.forEach((batch, step) => points.push({
          place, kind, batch, step, name: about.name,
          x: column(curve, kind, x)[step], y: column(curve, kind, y)[step], curve,
        }));
    drawn[id] = points;
    if (!points.length) return;
    const across = scale(points.map((one) => one.x), LEFT, W - RIGHT);
    const up = scale(points.map((one) => one.y), H - BOTTOM, TOP);
    for (const value of across.ticks) {
      svg.append(make("line", { x1: across.at(value), x2: across.at(value), y1: TOP, y2: H - BOTTOM, class: "grid" }));
      svg.append(make("text", { x: across.at(value), y: H - BOTTOM + 16, "text-anchor": "middle" }, number(value)));
    }
    for (const value of up.ticks) {
      svg.append(make("line", { x1: LEFT, x2: W - RIGHT, y1: up.at(value), y2: up.at(value), class: "grid" }));
      svg.append(make("text", { x: LEFT - 6, y: up.at(value) + 4, "text-anchor": "end" }, number(value)));
    }
    svg.append(make("text", { x: (LEFT + W - RIGHT) / 2, y: H - 6, "text-anchor": "middle" }, below));
    if (x === "batch") {
      svg.append(make("line", { x1: across.at(state.batch), x2: across.at(state.batch), y1: TOP, y2: H - BOTTOM, class: "now" }));
      const knees = new Map(state.formula !== "decode" ? [] :
        state.shown.filter(({ about }) => about.critical).map((one) => [one.about.critical, one.place]));
      let line = 0;
      for (const [critical, place] of knees) {
        if (critical < across.low || critical > across.high) continue;
        const at = across.at(critical), end = at > W / 2 ? "end" : "start";
        svg.append(make("line", { x1: at, x2: at, y1: TOP, y2: H - BOTTOM, class: `knee s${place}` }));
        svg.append(make("text", { x: at + (end === "end" ? -4 : 4), y: H - BOTTOM - 6 - 13 * line, "text-anchor": end },
          `critical batch ${number(critical)}`));
        line += 1;
      }
    }
    for (const one of points) { one.px = across.at(one.x); one.py = up.at(one.y); }
    for (const { place, curve } of state.shown) {
      for (const kind of state.kinds) {
        const along = points.filter((one) => one.place === place && one.kind === kind);
        const path = along.map((one) => `${one.px.toFixed(1)},${one.py.toFixed(1)}`).join(" ");
        svg.append(make("polyline", { points: path, fill: "none", stroke: "currentColor", class: `${kind} s${place}` }));
        const here = along[pointOf(curve, state.batch)];
        svg.append(make("circle", { cx: here.px, cy: here.py, r: kind === "expected" ? 5 : 3.5, fill: "currentColor", class: `s${place}` }));
      }
    }
  };

  const row = (cells, tag) => {
    const line = document.createElement("tr");
    cells.forEach((words, place) => {
      const cell = document.createElement(tag);
      cell.textContent = words;
      if (place > 1) cell.className = "n";
      line.append(cell);
    });
    return line;
  };
  const values = (state) => {
    const unit = data.unit, decodes = state.formula === "decode";
    const head = ["layout", "figures", "at once", ...(decodes ? [] : ["TTFT, ms"]), "ms between tokens", "tokens/s",
      `per ${unit}`, ...(data.usd ? ["M tokens a $"] : []), "bound by"];
    const lines = [row(head, "th")];
    for (const { about, curve } of state.shown) {
      const step = pointOf(curve, state.batch), most = curve.batch[curve.batch.length - 1];
      for (const kind of state.kinds) {
        const one = curve[kind], at = `${number(curve.batch[step])}${state.batch > most ? ", the most" : ""}`;
        lines.push(row([about.name, kind, at, ...(decodes ? [] : [number(one.ttft[step])]), number(one.tpot[step]),
          number(one.rate[step] * about.gpus), number(one.rate[step]),
          ...(data.usd ? [number(one.rate[step] * 0.0036 / data.usd)] : []),
          one.bound[step]], "td"));
      }
    }
    byId("values").replaceChildren(...lines);
  };

  const update = () => {
    const state = chosen(), about = data.formulas.find((one) => one.key === state.formula);
    const length = data.contexts[state.context];
    byId("context-says").value = number(length);
    byId("context").setAttribute("aria-valuetext", `${length} tokens`);
    byId("batch-says").value = number(state.batch);
    byId("batch").setAttribute("aria-valuetext", `${state.batch} requests at once`);
    byId("says").textContent = `Drawn: ${about.says}; prompts of ${number(length)} tokens. Expected: ${about.accuracy}.`;
    byId("rate-title").textContent = `Output tokens/s per ${data.unit}`;
    byId("time-title").textContent = state.formula === "decode" ? "Time of a step, ms" : "Time between tokens, ms";
    byId("both-title").textContent = `Output tokens/s per ${data.unit} by time between tokens`;
    Object.keys(CHARTS).forEach((id) => draw(id, state));
    values(state);
  };

  const tip = byId("tip");
  for (const id of Object.keys(CHARTS)) {
    const svg = byId(id);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * W / box.width, y = (event.clientY - box.top) * H / box.height;
      let best = null, least = Infinity;
      for (const one of drawn[id]) {
        const off = (one.px - x) ** 2 + (one.py - y) ** 2;
        if (off < least) { least = off; best = one; }
      }
      if (!best) return;
      const figures = best.curve[best.kind], place = grid.indexOf(best.batch);
      if (Number(byId("batch").value) !== place) { byId("batch").value = place; update(); }
      tip.textContent = `${best.name}, ${best.kind}\n${number(best.batch)} at once\n` +
        `${number(figures.tpot[best.step])} ms between tokens\n${number(figures.rate[best.step])} tokens/s per ${data.unit}`;
      tip.hidden = false;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8))}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
  document.querySelectorAll("input").forEach((one) => one.addEventListener("input", update));
  byId("tool").hidden = false;
  update();
})();
