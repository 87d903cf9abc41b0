// Draw every layer and head into `place`. `data` comes from overt.viz.head_browser. `ask` queries the
// kernel, if there is one: {layer} returns thumbnails, {layer, head} a complete head.
function drawHeads(data, place, ask) {
  "use strict";
  const MOST = 48; // tokens per column
  const LINES = 1500;
  const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const colours = bytes(data.colours);
  const half = (n) => { // half precision
    const power = (n >> 10) & 31, part = n & 1023;
    return power ? 2 ** (power - 15) * (1 + part / 1024) : 2 ** -24 * part;
  };
  const make = (kind, name, parent, text) => {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const button = (parent, text, act) => {
    const made = make("button", "", parent, text);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  };
  const said = (name) => name.trim().replace(/\n/g, "⏎") || "␣";
  const layers = data.layers.length, heads = data.heads;
  const queries = data.queries.length, keys = data.keys.length;
  const state = { ...data.start, key: null, first: 0, over: null, at: null, view: "lines" };
  const held = new Map(); // complete heads
  const small = data.small.map((one) => (one ? { ...one, pixels: bytes(one.pixels) } : null));
  for (const [where, one] of Object.entries(data.blocks)) held.set(where, opened(one));

  function opened(one) {
    const raw = new Uint16Array(bytes(one.weights).buffer);
    return { shape: one.shape, step: one.step, weights: Float32Array.from(raw, half), spread: false };
  }

  // --- the page

  const root = make("div", "overt-heads", place);
  const about = make("p", "oh-about", root, data.about);
  about.hidden = !data.about;
  const both = make("div", "oh-both", root);
  const left = make("section", "oh-left", both), right = make("section", "oh-right", both);
  make("h2", "", left, "All heads");
  make("p", "oh-soft", left, "Rows: layers; columns: heads; each on its own scale. Click one, or use the arrow keys.");
  const all = make("div", "oh-all", left);
  all.tabIndex = 0;
  all.setAttribute("role", "application");

  const title = make("h2", "oh-title", right);
  const note = make("p", "oh-note", right);
  note.setAttribute("role", "status");
  const bar = make("div", "oh-bar", right);
  const ways = make("div", "oh-ways", bar);
  const way = {};
  for (const [name, text] of [["lines", "Lines"], ["table", "Heat map"]]) {
    way[name] = button(ways, text, () => { state.view = name; draw(); });
  }
  const label = make("label", "", bar, "Token ");
  const field = make("input", "oh-token", label);
  const list = make("datalist", "", label);
  list.id = `oh-tokens-${Math.random().toString(36).slice(2)}`;
  field.setAttribute("list", list.id);
  field.placeholder = "a word or a number";
  data.queries.slice(0, 2000).forEach((name, at) => { make("option", "", list).value = `${at} ${said(name)}`; });
  field.addEventListener("change", () => pick(find(field.value)));
  const every = button(bar, "All tokens", () => { state.key = null; pick(null); });
  const far = make("label", "oh-far", bar, "From ");
  const slider = make("input", "", far);
  slider.type = "range"; slider.min = 0;
  slider.setAttribute("aria-label", "First token of the column");
  slider.addEventListener("input", () => { state.first = Number(slider.value); draw(); });
  const canvasRoom = make("div", "oh-room", right);
  const lines = make("div", "oh-lines", canvasRoom);
  const table = make("div", "oh-table", canvasRoom);
  const told = make("p", "oh-told", right);
  told.setAttribute("aria-live", "polite");

  function find(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return null;
    const number = wanted.match(/^(\d+)\b/);
    if (number && Number(number[1]) < queries) return Number(number[1]);
    const at = data.queries.findIndex((name) => said(name).toLowerCase().replace(/^(##|ġ|▁)/, "") === wanted);
    if (at < 0) note.textContent = `Unknown token “${text}”.`;
    return at < 0 ? state.query : at;
  }
  function pick(query) {
    state.query = query; state.over = null;
    field.value = query === null ? "" : `${query} ${said(data.queries[query])}`;
    const block = current();
    if (query !== null && block) {
      const at = Math.floor(query / block.step[0]);
      if (at < state.first || at >= state.first + MOST) state.first = Math.max(0, at - (MOST >> 1));
    }
    draw();
  }

  // --- all heads

  const tile = Math.max(14, Math.min(52, Math.floor(620 / heads) - 3)), gap = 3;
  const sharp = Math.min(3, Math.max(2, window.devicePixelRatio || 1));
  const ruler = make("div", "oh-ruler", all);
  make("span", "oh-number", ruler, "");
  for (let head = 0; head < heads; head++) {
    const name = make("span", "", ruler, heads <= 24 || head % 4 === 0 ? String(head) : "");
    name.style.width = `${tile + gap}px`;
  }
  const rows = data.layers.map((name, layer) => {
    const row = make("div", "oh-layer", all);
    const number = make("span", "oh-number", row, String(layer));
    number.title = name;
    const canvas = make("canvas", "oh-ink", row);
    canvas.width = sharp * heads * (tile + gap); canvas.height = sharp * (tile + gap);
    canvas.style.width = `${heads * (tile + gap)}px`; canvas.style.height = `${tile + gap}px`;
    canvas.addEventListener("click", (event) => {
      const head = Math.floor(event.offsetX / (tile + gap));
      if (head >= 0 && head < heads) open(layer, head);
      all.focus({ preventScroll: true });
    });
    return canvas;
  });
  function paintLayer(layer) {
    const one = small[layer], context = rows[layer].getContext("2d");
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    context.clearRect(0, 0, heads * (tile + gap), tile + gap);
    context.imageSmoothingEnabled = false;
    for (let head = 0; head < heads; head++) {
      const x = head * (tile + gap) + 1, on = layer === state.layer && head === state.head;
      if (one) {
        const [r, c] = one.shape;
        const levels = one.pixels.subarray(head * r * c, (head + 1) * r * c);
        context.drawImage(painted(levels, r, c, 255), x, 1, tile, tile);
      }
      context.lineWidth = on ? 2 : 1;
      context.strokeStyle = on ? "#b3470a" : "#b8b8bd";
      context.strokeRect(x - (on ? 0 : 0.5), on ? 1 : 0.5, tile + (on ? 0 : 1), tile + (on ? 0 : 1));
    }
  }
  function painted(values, down, across, top) {
    const canvas = document.createElement("canvas");
    canvas.width = across; canvas.height = down;
    const image = new ImageData(across, down);
    for (let n = 0; n < down * across; n++) {
      const level = Math.min(255, Math.round(255 * values[n] / (top || 1))) * 3;
      for (let c = 0; c < 3; c++) image.data[4 * n + c] = colours[level + c];
      image.data[4 * n + 3] = 255;
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }
  all.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    open(Math.min(layers - 1, Math.max(0, state.layer + move[0])), Math.min(heads - 1, Math.max(0, state.head + move[1])));
    rows[state.layer].scrollIntoView({ block: "nearest" });
  });
  if (ask) { // thumbnails of a layer are requested when it becomes visible
    const watcher = new IntersectionObserver((found) => {
      for (const { isIntersecting, target } of found) {
        const layer = rows.indexOf(target);
        if (!isIntersecting || small[layer]) continue;
        watcher.unobserve(target);
        ask({ layer }).then((reply) => {
          if (reply.wrong) { note.textContent = reply.wrong; return; }
          small[layer] = { ...reply.small, pixels: bytes(reply.small.pixels) };
          paintLayer(layer);
        });
      }
    });
    for (const canvas of rows) watcher.observe(canvas);
  }

  // --- the open head

  let pending = "";
  function open(layer, head) {
    const before = state.layer;
    state.layer = layer; state.head = head; state.over = null; state.at = null;
    paintLayer(before);
    paintLayer(layer);
    const where = `${layer} ${head}`;
    if (ask && !held.has(where) && pending !== where) {
      pending = where;
      ask({ layer, head }).then((reply) => {
        if (pending === where) pending = "";
        if (reply.block) held.set(where, opened(reply.block));
        if (state.layer === layer && state.head === head) draw(reply.wrong);
      });
    }
    draw();
  }
  function current() {
    const where = `${state.layer} ${state.head}`;
    if (held.has(where)) return held.get(where);
    const one = small[state.layer];
    if (!one || ask) return null;
    const [r, c] = one.shape, top = one.tops[state.head];
    const levels = one.pixels.subarray(state.head * r * c, (state.head + 1) * r * c);
    return {
      shape: [r, c], step: [Math.ceil(queries / r), Math.ceil(keys / c)], coarse: true,
      weights: Float32Array.from(levels, (level) => level * top / 255), spread: true,
    };
  }
  const range = (names, at, step) => {
    const last = Math.min(names.length, (at + 1) * step) - 1, first = at * step;
    return last > first ? `${said(names[first])} … ${said(names[last])}` : said(names[first]);
  };
  const queryName = (block, at) => (block.spread ? said(data.queries[at * block.step[0]]) : range(data.queries, at, block.step[0]));
  const keyName = (block, at) => range(data.keys, at, block.step[1]);

  function draw(wrong) {
    title.textContent = `Layer ${state.layer}, head ${state.head}`;
    title.title = data.layers[state.layer];
    all.setAttribute("aria-label", `All layers and heads: layer ${state.layer}, head ${state.head} is open; arrow keys open another`);
    for (const name of Object.keys(way)) way[name].setAttribute("aria-pressed", String(state.view === name));
    every.disabled = state.query === null && state.key === null;
    const block = current();
    lines.hidden = !block || state.view !== "lines";
    table.hidden = !block || state.view !== "table";
    note.textContent = wrong || "";
    if (!block) {
      note.textContent = wrong || "Computing …";
      told.textContent = ""; far.hidden = true;
      return;
    }
    if (block.coarse && (block.step[0] > 1 || block.step[1] > 1)) {
      const [a, b] = block.step;
      note.textContent = `This file has only a thumbnail of this head: one query in ${a}, the largest of ${b} keys. head_view(..., layer=${state.layer}, head=${state.head}) shows it in full.`;
    } else if (block.coarse) {
      note.textContent = `This file has only a thumbnail of this head, in 256 steps. head_view(..., layer=${state.layer}, head=${state.head}) shows it in full.`;
    } else if (block.step[0] > 1 || block.step[1] > 1) {
      note.textContent = `Reduced: each point is the largest of ${block.step[0]} x ${block.step[1]} weights. Select a smaller block, such as head_view(..., query=range(0, 400), key=range(0, 400)).`;
    }
    far.hidden = state.view !== "lines" || block.shape[0] <= MOST;
    slider.max = Math.max(0, block.shape[0] - MOST);
    state.first = Math.min(state.first, Number(slider.max));
    slider.value = state.first;
    if (state.view === "lines") drawLines(block); else drawTable(block);
    tell(block);
  }

  function tell(block) {
    const [, across] = block.shape;
    if (state.at) {
      const [q, k] = state.at;
      told.textContent = `${queryName(block, q)} attends to ${keyName(block, k)}: ${block.weights[q * across + k].toFixed(4)}`;
      return;
    }
    const query = state.over ?? (state.query === null ? null : Math.min(block.shape[0] - 1, Math.floor(state.query / block.step[0])));
    if (query === null) {
      const top = block.weights.reduce((a, b) => Math.max(a, b), 0);
      told.textContent = `${state.view === "lines" ? "Click a token to see only its lines." : "Point at a cell to read it."} The largest weight is ${top.toFixed(3)}.`;
      return;
    }
    const row = block.weights.subarray(query * across, (query + 1) * across);
    const best = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 5).filter((at) => row[at] > 0);
    const most = best.map((at) => `${keyName(block, at)} ${row[at].toFixed(3)}`).join(", ");
    told.textContent = `${queryName(block, query)} attends most to ${most || "nothing"}`;
  }

  // --- lines between two columns of tokens

  let shown = null; // cache of the columns, so that pointing does not rebuild them
  function drawLines(block) {
    const [down, across] = block.shape;
    const from = Array.from({ length: Math.min(MOST, down) }, (_, n) => state.first + n);
    const onto = strongest(block, from);
    const key = `${state.layer} ${state.head} ${state.first} ${held.has(`${state.layer} ${state.head}`)}`;
    if (!shown || shown.key !== key) {
      lines.replaceChildren();
      shown = { key, from: column(block, from, "query"), svg: null, onto: null };
      shown.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      lines.append(shown.svg);
      shown.onto = column(block, onto, "key");
    }
    const pitch = 22, tall = pitch * Math.max(from.length, onto.length);
    shown.svg.setAttribute("viewBox", `0 0 100 ${tall}`);
    shown.svg.setAttribute("preserveAspectRatio", "none");
    shown.svg.style.height = `${tall}px`;
    shown.svg.setAttribute("aria-hidden", "true");
    const one = state.over ?? (state.query === null ? null : Math.floor(state.query / block.step[0]));
    const wanted = [];
    let top = 0, drawn = 0, total = 0;
    from.forEach((q, y) => {
      onto.forEach((k, v) => {
        const weight = block.weights[q * across + k];
        if ((one !== null && q !== one) || (state.key !== null && k !== state.key)) return;
        if (weight > 0) wanted.push([weight, y, v]);
        top = Math.max(top, weight); // of the drawn lines
      });
      if (one === null || q === one) for (let k = 0; k < across; k++) total += block.weights[q * across + k];
    });
    const rowsDrawn = one === null ? from.length : 1; // uniform rows stay pale
    top = Math.max(top, 4 * total / (rowsDrawn * across));
    wanted.sort((a, b) => b[0] - a[0]);
    const parts = document.createDocumentFragment();
    for (const [weight, y, v] of wanted.slice(0, LINES)) {
      const share = weight / top;
      drawn += weight;
      if (share < 0.01) continue;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const at = { x1: 0, y1: pitch * (y + 0.5), x2: 100, y2: pitch * (v + 0.5), "stroke-opacity": (share ** 0.7).toFixed(3), "stroke-width": (0.6 + 2.6 * share).toFixed(2) };
      for (const [name, value] of Object.entries(at)) line.setAttribute(name, value);
      parts.append(line);
    }
    shown.svg.replaceChildren(parts);
    shown.from.forEach((made, n) => made.setAttribute("aria-pressed", String(from[n] === one)));
    shown.onto.forEach((made, n) => {
      made.setAttribute("aria-pressed", String(onto[n] === state.key));
      const level = one === null ? 0 : block.weights[one * across + onto[n]] / (top || 1);
      made.style.setProperty("--level", `${Math.round(70 * level)}%`);
      made.title = one === null ? "" : block.weights[one * across + onto[n]].toFixed(4);
    });
    if (onto.length < across && state.key === null) {
      const share = total > 0 ? Math.round(100 * drawn / total) : 0;
      note.textContent = `${note.textContent} ${onto.length} of ${across} keys, those with the largest weights; they have ${share} % of the weight of these queries.`.trim();
    }
  }
  function strongest(block, from) {
    const [, across] = block.shape, best = new Float64Array(across);
    if (across <= MOST * 1.5) return [...best.keys()];
    for (const q of from) for (let k = 0; k < across; k++) best[k] = Math.max(best[k], block.weights[q * across + k]);
    return [...best.keys()].sort((a, b) => best[b] - best[a]).slice(0, MOST).sort((a, b) => a - b);
  }
  function column(block, places, kind) {
    const side = make("div", `oh-column oh-${kind}`, lines);
    const name = kind === "query" ? queryName : keyName;
    side.setAttribute("role", "group");
    side.setAttribute("aria-label", kind === "query" ? "Queries" : "Keys");
    const made = places.map((at) => {
      const one = button(side, name(block, at), () => {
        if (kind === "key") { state.key = state.key === at ? null : at; draw(); return; }
        const whole = at * block.step[0];
        pick(state.query === whole ? null : whole);
      });
      if (kind === "query") {
        one.addEventListener("pointerenter", () => { state.over = at; drawLines(block); tell(block); });
        one.addEventListener("pointerleave", () => { state.over = null; drawLines(block); tell(block); });
      }
      return one;
    });
    made.forEach((one, n) => { // one tab stop; arrow keys move within
      one.tabIndex = n ? -1 : 0;
      one.addEventListener("keydown", (event) => {
        const next = { ArrowDown: n + 1, ArrowUp: n - 1, Home: 0, End: made.length - 1 }[event.key];
        if (next === undefined || !made[next]) return;
        event.preventDefault();
        one.tabIndex = -1; made[next].tabIndex = 0; made[next].focus();
      });
    });
    return made;
  }

  // --- a heat map: queries down, keys across

  const sheet = make("canvas", "oh-ink", table);
  sheet.tabIndex = 0;
  sheet.setAttribute("role", "application");
  let size = null;
  function drawTable(block) {
    const [down, across] = block.shape;
    const named = Math.max(down, across) <= 60, side = named ? 96 : 2;
    const unit = Math.max(1, Math.min(20, Math.floor((Math.max(280, canvasRoom.clientWidth) - side - 4) / across)));
    size = { side, unit, down, across };
    sheet.width = sharp * (side + unit * across + 2); sheet.height = sharp * (side + unit * down + 2);
    sheet.style.width = `${side + unit * across + 2}px`;
    sheet.setAttribute("aria-label", `Weights of ${down} queries on ${across} keys; arrow keys move`);
    let top = 0;
    for (const weight of block.weights) top = Math.max(top, weight);
    const context = sheet.getContext("2d");
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(painted(block.weights, down, across, top), side, side, unit * across, unit * down);
    context.strokeStyle = "#b8b8bd";
    context.strokeRect(side - 0.5, side - 0.5, unit * across + 1, unit * down + 1);
    context.fillStyle = "#1d1d1f"; context.textBaseline = "middle";
    context.font = `${Math.min(12, unit)}px system-ui, sans-serif`;
    if (named) {
      context.textAlign = "right";
      for (let q = 0; q < down; q++) context.fillText(queryName(block, q).slice(0, 16), side - 6, side + unit * (q + 0.5), side - 8);
      context.textAlign = "left";
      for (let k = 0; k < across; k++) {
        context.save();
        context.translate(side + unit * (k + 0.5), side - 6); context.rotate(-Math.PI / 2);
        context.fillText(keyName(block, k).slice(0, 16), 0, 0, side - 8);
        context.restore();
      }
    }
    context.strokeStyle = "#b3470a"; context.lineWidth = 1.5;
    const q = state.at ? state.at[0] : state.query === null ? null : Math.floor(state.query / block.step[0]);
    if (q !== null) context.strokeRect(side, side + unit * q, unit * across, Math.max(2, unit));
    if (state.at) context.strokeRect(side + unit * state.at[1], side + unit * q, Math.max(2, unit), Math.max(2, unit));
  }
  const cell = (event) => {
    const q = Math.floor((event.offsetY - size.side) / size.unit), k = Math.floor((event.offsetX - size.side) / size.unit);
    return q >= 0 && k >= 0 && q < size.down && k < size.across ? [q, k] : null;
  };
  const point = (at) => { state.at = at; const block = current(); if (block) { drawTable(block); tell(block); } };
  sheet.addEventListener("pointermove", (event) => point(cell(event)));
  sheet.addEventListener("pointerleave", () => point(null));
  sheet.addEventListener("click", (event) => {
    const at = cell(event), block = current();
    if (at && block) pick(at[0] * block.step[0]);
  });
  sheet.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move || !size) return;
    event.preventDefault();
    const [q, k] = state.at || [0, 0];
    point([Math.min(size.down - 1, Math.max(0, q + move[0])), Math.min(size.across - 1, Math.max(0, k + move[1]))]);
  });

  for (let layer = 0; layer < layers; layer++) paintLayer(layer);
  if (state.query !== null) pick(state.query);
  open(state.layer, state.head);
}

// The same as a widget: missing heads are requested from the kernel.
function drawLive({ model, el }) {
  const waiting = new Map();
  let count = 0;
  model.on("msg:custom", (reply) => {
    const done = waiting.get(reply.id);
    waiting.delete(reply.id);
    if (done) done(reply);
  });
  const ask = (what) => new Promise((done) => {
    count += 1;
    waiting.set(count, done);
    model.send({ ...what, id: count });
  });
  drawHeads(model.get("data"), el, ask);
}
