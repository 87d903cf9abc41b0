// Draws panels of attention into `place`. `data` is what overt.show.browse.told gives. With `touch`,
// a click while `removing()` holds asks for a part of the input to be removed or put back.
function drawPanels(data, place, hooks) {
  "use strict";
  const { touch = null, removing = () => false } = hooks || {};
  const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const heat = bytes(data.heat), white = bytes(data.white);
  const half = Float32Array.from({ length: 65536 }, (_, n) => { // numbers of sixteen bits
    const power = (n >> 10) & 31, part = n & 1023;
    const size = power ? 2 ** (power - 15) * (1 + part / 1024) : 2 ** -24 * part;
    return n >> 15 ? -size : size;
  });
  const make = (kind, name, parent, text) => {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };

  const gone = data.removed || { without: [], unsaid: [] };

  // characters of the text that was given, for those of the text that is shown: a prompt may stand around it, a sign in the
  // place of a word; null where they are nobody's words
  function given([from, to]) {
    if (!gone.origin) return [from, to];
    let found = null, most = 0;
    for (const [a, b, c, d] of gone.origin) {
      const start = Math.max(from, a), end = Math.min(to, b);
      if (end - start <= most) continue;
      most = end - start;
      found = b - a === d - c ? [c + start - a, c + end - a] : [c, d];
    }
    return found;
  }

  data.panels.forEach((panel, number) => show(panel, number));

  function show(panel, number) {
    const queries = panel.queries.names.length, keys = panel.keys.names.length;
    const held = new Uint16Array(bytes(panel.weights).buffer);
    const state = { ...panel.start, hover: undefined };
    const heads = [...Array(panel.heads).keys()];
    const seen = panel.rows.flatMap((there, at) => (there ? [at] : []));

    // one row of weights; a head or a query that is null stands for the mean of all
    const row = (layer, head, query) => {
      const found = new Float64Array(keys);
      const of = head === null ? heads : [head], from = query === null ? seen : [query];
      for (const h of of) for (const q of from) {
        const at = (layer * panel.heads + h) * queries + q;
        const share = 1 / of.length / from.length;
        for (let k = 0; k < keys; k++) found[k] += half[held[at * keys + k]] * share;
      }
      return found;
    };
    const highest = (values) => { // as in overt.show.overlay: what prefers nothing stays pale
      let top = 0, sum = 0;
      for (const value of values) { top = Math.max(top, value); sum += value; }
      return Math.max(top, 4 * sum / (values.length || 1));
    };
    const smooth = (values, rows, columns, times) => { // bilinear between the centres of cells
      const found = new Float64Array(rows * columns * times * times);
      const line = (count) => Array.from({ length: count * times }, (_, n) => {
        const at = Math.min(count - 1, Math.max(0, (n + 0.5) / times - 0.5)), low = Math.floor(at);
        return [low, Math.min(count - 1, low + 1), at - low];
      });
      const down = line(rows), across = line(columns);
      down.forEach(([a, b, v], r) => across.forEach(([c, d, u], n) => {
        const upper = values[a * columns + c] * (1 - u) + values[a * columns + d] * u;
        const lower = values[b * columns + c] * (1 - u) + values[b * columns + d] * u;
        found[r * columns * times + n] = upper * (1 - v) + lower * v;
      }));
      return found;
    };
    const painted = (values, rows, columns, colours, wide, top = highest(values) || 1) => {
      const canvas = document.createElement("canvas");
      canvas.width = columns; canvas.height = rows;
      const image = new ImageData(columns, rows);
      for (let n = 0; n < rows * columns; n++) {
        const level = Math.min(255, Math.round(255 * values[n] / top)) * wide;
        for (let c = 0; c < 3; c++) image.data[4 * n + c] = colours[level + c];
        image.data[4 * n + 3] = wide === 4 ? colours[level + 3] : 255;
      }
      canvas.getContext("2d").putImageData(image, 0, 0);
      return canvas;
    };

    const section = make("section", "panel", place);
    section.setAttribute("aria-label", panel.title);
    make("h2", "", section, panel.title);
    if (panel.about) make("p", "about", section, panel.about);
    const form = make("div", "choose", section);
    const field = (name) => { const made = make("label", "", form, name); return made; };
    const slider = make("input", "layer", field("Layer"));
    slider.type = "range"; slider.min = 0; slider.max = panel.layers.length - 1; slider.value = state.layer;
    slider.setAttribute("aria-label", `Layer of ${panel.title}`);
    const choice = make("select", "head", field("Head"));
    if (panel.heads > 1) make("option", "", choice, "mean of all").value = "";
    for (const head of heads) make("option", "", choice, String(head)).value = head;
    choice.value = state.head === null ? (panel.heads > 1 ? "" : "0") : state.head;
    const spoken = panel.queries.blocks.every((block) => block.kind === "text");
    const mean = make("button", "mean", form, spoken ? "All words together" : "Mean of all queries");
    mean.type = "button";
    slider.addEventListener("input", () => { state.layer = Number(slider.value); draw(); });
    choice.addEventListener("change", () => { state.head = choice.value === "" ? null : Number(choice.value); draw(); });
    mean.addEventListener("click", () => { state.query = null; draw(); });
    slider.parentNode.hidden = panel.layers.length === 1; // what leaves no choice is not offered
    choice.parentNode.hidden = panel.heads === 1;
    mean.hidden = queries === 1;
    const now = make("p", "now", section);
    now.setAttribute("aria-live", "polite");

    // parts of one whole are told in percent, anything else as it is
    let whole = false;
    const amount = (value) => (whole ? `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %` : value.toPrecision(3));
    const pick = (at) => { state.query = at; state.hover = undefined; draw(); };
    const hover = (at) => { if (at !== state.hover) { state.hover = at; draw(); } };
    const query = () => (state.hover === undefined ? state.query : state.hover);

    const redraw = [];
    if (!panel.same && queries > 1) {
      make("h3", "", section, spoken ? "Click a word" : "Looking from");
      axis(panel.queries, true, false);
      make("h3", "", section, spoken ? "to see where it looks" : "Looking at");
    }
    axis(panel.keys, panel.same, true);
    const pictures = panel.keys.blocks.filter((block) => block.kind === "grid");
    const regions = panel.keys.blocks.some((block) => block.kind === "boxes");
    if (!pictures.length && !regions && queries > 1) table();
    if (panel.layers.length * panel.heads > 1) tiles();

    // what stands along an axis: as something to choose a query from, to show weights on, or both
    function axis(side, from, onto) {
      const place = make("div", "axis", section);
      for (const block of side.blocks) {
        if (block.kind === "grid") picture(side, block, place, from, onto);
        else if (block.kind === "boxes") boxes(side, block, place, from, onto);
        else {
          const inside = make("div", block.kind, place);
          const parts = block.kind === "text" ? block.parts : block.at.map((at) => [side.names[at], at]);
          let start = 0; // pieces of a text are all of it, so they say where in it they stand
          for (const [piece, at] of parts) {
            const length = [...piece].length; // in characters, as Python counts
            const range = block.kind === "text" ? given([start, start + length]) : null;
            if (at < 0) inside.append(piece);
            else token(inside, piece, at, from, onto, block.kind === "text" ? parts : null, range);
            start += length;
          }
        }
      }
    }

    function token(inside, piece, at, from, onto, among, range) {
      const made = make("button", "token", inside, piece.trim() ? piece : piece || "·");
      made.type = "button";
      made.dataset.at = at;
      if (range && gone.unsaid.some(([a, b]) => a < range[1] && range[0] < b)) made.classList.add("gone");
      made.addEventListener("click", () => {
        if (touch && removing() && range) touch({ range });
        else if (from) pick(at);
      });
      if (from) {
        made.addEventListener("pointerenter", () => hover(at));
        made.addEventListener("pointerleave", () => hover(undefined));
      }
      redraw.push((weights, most) => {
        if (onto) {
          let top = among ? 0 : most;
          if (among) for (const [, other] of among) if (other >= 0) top = Math.max(top, weights[other]);
          const level = weights[at] / (top || 1);
          made.style.background = `color-mix(in srgb, var(--mark) ${Math.round(100 * level)}%, transparent)`;
          made.title = `${piece}: ${amount(weights[at])}`;
        }
        made.setAttribute("aria-pressed", String(from && query() === at));
      });
    }

    // a photo in its own shape, dimmed where something is painted over it, without what is removed
    function framed(block, place, size, dim) {
      const figure = make("figure", block.photo === undefined ? "plain" : "", place);
      const frame = make("div", "picture", figure);
      frame.style.aspectRatio = `${size[0]} / ${size[1]}`;
      if (block.photo !== undefined) {
        const under = make("div", `photo photo-${block.photo}${dim ? " under" : ""}`, frame);
        if (data.photos) under.style.setProperty("--photo", `url("${data.photos[block.photo]}")`);
      }
      return [figure, frame];
    }
    function covers(frame) {
      for (const [l, t, r, b] of gone.without) {
        const cover = make("div", "gone", frame);
        Object.assign(cover.style, { left: `${100 * l}%`, top: `${100 * t}%`, width: `${100 * (r - l)}%`, height: `${100 * (b - t)}%` });
      }
    }
    const add = (all) => all.reduce((a, b) => a + b, 0);
    const share = (values, weights) => `${(100 * add(values) / (add(weights) || 1)).toFixed(1)} % of the weight`;

    // boxes of a photo: each is filled by its weight, and can be chosen or removed
    function boxes(side, block, place, from, onto) {
      const [figure, frame] = framed(block, place, block.size, onto);
      frame.classList.add("boxes");
      const area = ([l, t, r, b]) => (r - l) * (b - t);
      const order = block.boxes.map((_, n) => n).sort((a, b) => area(block.boxes[b]) - area(block.boxes[a]));
      const made = [];
      for (const n of order) { // small ones lie over large ones
        const [l, t, r, b] = block.boxes[n], at = block.at[n];
        if (at < 0 || r <= l || b <= t) continue;
        const one = make("button", "region", frame);
        one.type = "button";
        Object.assign(one.style, { left: `${100 * l}%`, top: `${100 * t}%`, width: `${100 * (r - l)}%`, height: `${100 * (b - t)}%` });
        const label = make("span", "", one);
        one.addEventListener("click", () => {
          if (touch && removing() && block.photo !== undefined) touch({ box: [l, t, r, b] });
          else if (from) pick(at);
        });
        made.push([one, label, at]);
      }
      covers(frame);
      const told = onto ? make("p", "range", figure) : null;
      redraw.push((weights) => {
        const values = block.at.map((at) => (at < 0 ? 0 : weights[at]));
        const top = highest(values) || 1, strong = [...values].sort((a, b) => b - a)[2] || 0;
        for (const [one, label, at] of made) {
          const level = 4 * Math.min(255, Math.round(255 * weights[at] / top));
          const best = onto && weights[at] > 0 && weights[at] >= strong;
          if (onto) one.style.background = `rgba(${heat[level]}, ${heat[level + 1]}, ${heat[level + 2]}, ${(heat[level + 3] / 255).toFixed(3)})`;
          one.classList.toggle("best", best);
          label.textContent = best ? amount(weights[at]) : "";
          const said = onto ? `${side.names[at]}: ${amount(weights[at])}` : side.names[at];
          one.title = said;
          one.setAttribute("aria-label", said);
          if (from) one.setAttribute("aria-pressed", String(query() === at));
        }
        if (told) told.textContent = `${share(values, weights)} is on these ${made.length} boxes`;
      });
    }

    function picture(side, block, place, from, onto) {
      const [rows, columns] = block.shape;
      const [figure, frame] = framed(block, place, block.size || [columns, rows], onto && !panel.hard);
      const [left, top, wide, tall] = block.place || [0, 0, 1, 1];
      const [x, y, w, h] = block.kept || [0, 0, 1, 1];
      const seen = make("div", "window", frame);
      seen.style.clipPath = `inset(${100 * y}% ${100 * (1 - x - w)}% ${100 * (1 - y - h)}% ${100 * x}%)`;
      const canvas = make("canvas", "heat", seen);
      const times = block.photo === undefined ? 1 : Math.ceil(192 / Math.max(rows, columns));
      canvas.width = columns * times; canvas.height = rows * times;
      canvas.setAttribute("role", "img");
      Object.assign(canvas.style, { left: `${100 * left}%`, top: `${100 * top}%`, width: `${100 * wide}%`, height: `${100 * tall}%` });
      if (block.flip) canvas.style.transform = "scaleX(-1)";
      const mark = make("div", "cell", frame);
      covers(frame);
      if (onto && panel.hard) {
        canvas.classList.add("kept");
        const told = make("p", "range", figure);
        redraw.push((weights) => {
          const values = block.at.map((at) => (at < 0 ? 0 : weights[at]));
          const context = canvas.getContext("2d"), count = values.filter((value) => value > 0).length;
          context.clearRect(0, 0, canvas.width, canvas.height);
          context.fillStyle = "rgba(24, 24, 28, .8)"; // what was dropped; what was kept stays as it is
          values.forEach((value, n) => { if (!(value > 0)) context.fillRect((n % columns) * times, Math.floor(n / columns) * times, times, times); });
          told.textContent = `${count} of ${values.length} cells are kept; what is dark was not looked at`;
          canvas.setAttribute("aria-label", `${block.name}: ${told.textContent}`);
        });
      } else if (onto) {
        const range = make("p", "range", figure, "0 ");
        make("span", "scale", range);
        const told = make("span", "told", range);
        redraw.push((weights) => {
          const values = block.at.map((at) => (at < 0 ? 0 : weights[at]));
          const context = canvas.getContext("2d");
          context.clearRect(0, 0, canvas.width, canvas.height);
          const fine = smooth(values, rows, columns, times);
          context.drawImage(painted(fine, rows * times, columns * times, heat, 4, highest(values) || 1), 0, 0);
          told.textContent = `${highest(values).toPrecision(3)} · ${share(values, weights)} is on this picture`;
          canvas.setAttribute("aria-label", `${block.name}: ${share(values, weights)}`);
        });
      }
      const cell = (event) => {
        const box = frame.getBoundingClientRect();
        let across = ((event.clientX - box.left) / box.width - left) / wide;
        const down = ((event.clientY - box.top) / box.height - top) / tall;
        if (block.flip) across = 1 - across;
        if (across < 0 || across >= 1 || down < 0 || down >= 1) return undefined;
        const at = block.at[Math.floor(down * rows) * columns + Math.floor(across * columns)];
        return at < 0 ? undefined : at;
      };
      const box = (at) => { // of a cell, as shares of the photo
        const n = block.at.indexOf(at), r = Math.floor(n / columns);
        const c = block.flip ? columns - 1 - (n % columns) : n % columns;
        const x = left + wide * c / columns, y = top + tall * r / rows;
        const inside = (value) => Math.min(1, Math.max(0, value));
        return [x, y, x + wide / columns, y + tall / rows].map(inside);
      };
      const remove = (at) => touch && removing() && block.photo !== undefined && (touch({ box: box(at) }), true);
      if (from) {
        frame.tabIndex = 0;
        frame.setAttribute("role", "application");
        frame.setAttribute("aria-label", `${block.name}: arrow keys choose a cell`);
        frame.addEventListener("pointermove", (event) => hover(cell(event)));
        frame.addEventListener("pointerleave", () => hover(undefined));
        frame.addEventListener("click", (event) => { const at = cell(event); if (at !== undefined && !remove(at)) pick(at); });
        frame.addEventListener("keydown", (event) => {
          if (event.key === "Enter" && remove(state.query)) return;
          const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
          if (!move) return;
          event.preventDefault();
          const at = Math.max(0, block.at.indexOf(state.query));
          const r = Math.min(rows - 1, Math.max(0, Math.floor(at / columns) + move[0]));
          const c = Math.min(columns - 1, Math.max(0, at % columns + move[1] * (block.flip ? -1 : 1)));
          pick(block.at[r * columns + c]);
        });
      } else if (touch && block.photo !== undefined) chooseCell(frame, block, cell, remove);
      else frame.style.cursor = "default";
      redraw.push(() => {
        const at = from && query() !== null ? block.at.indexOf(query()) : -1;
        mark.hidden = at < 0;
        const r = Math.floor(at / columns), c = block.flip ? columns - 1 - (at % columns) : at % columns;
        Object.assign(mark.style, {
          left: `${100 * (left + wide * c / columns)}%`, top: `${100 * (top + tall * r / rows)}%`,
          width: `${100 * wide / columns}%`, height: `${100 * tall / rows}%`,
        });
      });
    }

    // a picture that nothing looks from: its cells can still be chosen, to be removed
    function chooseCell(frame, block, cell, remove) {
      const [rows, columns] = block.shape;
      let r = 0, c = 0;
      frame.tabIndex = 0;
      frame.setAttribute("role", "application");
      const say = () => frame.setAttribute("aria-label", `${block.name}: cell ${r},${c}; arrow keys choose one, Enter removes it`);
      say();
      frame.addEventListener("click", (event) => { const at = cell(event); if (at !== undefined) remove(at); });
      frame.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (event.key === "Enter") remove(block.at[r * columns + c]);
        if (!move) return;
        event.preventDefault();
        r = Math.min(rows - 1, Math.max(0, r + move[0])); c = Math.min(columns - 1, Math.max(0, c + move[1]));
        say();
      });
    }

    function block(layer, head) { // every row of one layer and head
      const found = new Float64Array(queries * keys);
      for (let q = 0; q < queries; q++) found.set(row(layer, head, q), q * keys);
      return found;
    }

    function table() {
      make("h3", "", section, "Queries down, keys across");
      const named = Math.max(queries, keys) <= 80, side = named ? 92 : 0;
      const unit = Math.max(2, Math.min(18, Math.floor(1050 / keys)));
      const canvas = make("canvas", "table", section), sharp = 2;
      canvas.width = sharp * (side + unit * keys); canvas.height = sharp * (side + unit * queries);
      canvas.style.width = `${side + unit * keys}px`;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Weights of ${queries} queries on ${keys} keys`);
      const over = (event) => {
        const box = canvas.getBoundingClientRect(), size = canvas.width / sharp / box.width;
        const q = Math.floor(((event.clientY - box.top) * size - side) / unit);
        return q >= 0 && q < queries ? q : undefined;
      };
      canvas.addEventListener("pointermove", (event) => hover(over(event)));
      canvas.addEventListener("pointerleave", () => hover(undefined));
      canvas.addEventListener("click", (event) => { const at = over(event); if (at !== undefined) pick(at); });
      let last = "", kept = null;
      redraw.push(() => {
        const key = `${state.layer} ${state.head}`;
        if (key !== last) { kept = painted(block(state.layer, state.head), queries, keys, white, 3); last = key; }
        const context = canvas.getContext("2d");
        context.setTransform(sharp, 0, 0, sharp, 0, 0);
        context.clearRect(0, 0, canvas.width, canvas.height);
        context.imageSmoothingEnabled = false;
        context.drawImage(kept, side, side, unit * keys, unit * queries);
        context.fillStyle = "#1d1d1f"; context.strokeStyle = "#1d1d1f"; context.textBaseline = "middle";
        context.font = `${Math.min(12, unit - 1)}px system-ui, sans-serif`;
        if (named) {
          context.textAlign = "right";
          panel.queries.names.forEach((name, n) => context.fillText(name.trim().slice(0, 14), side - 6, side + unit * (n + 0.5), side - 8));
          context.textAlign = "left";
          panel.keys.names.forEach((name, n) => {
            context.save();
            context.translate(side + unit * (n + 0.5), side - 6); context.rotate(-Math.PI / 2);
            context.fillText(name.trim().slice(0, 14), 0, 0, side - 8);
            context.restore();
          });
        }
        if (query() !== null) context.strokeRect(side + 0.5, side + unit * query() + 0.5, unit * keys - 1, unit - 1);
      });
    }

    function tiles() {
      const grid = pictures[0], layers = panel.layers.length;
      make("h3", "", section, "Every layer (down) and head (across), each on its own scale");
      const [rows, columns] = grid ? grid.shape : [queries, keys];
      const room = 1100 / panel.heads, gap = 4, edge = 26;
      const unit = Math.min(room - gap, 84) / Math.max(rows, columns);
      const wide = Math.max(6, unit * columns), tall = Math.max(6, unit * rows), sharp = 2;
      const canvas = make("canvas", "tiles", section);
      const width = edge + (wide + gap) * panel.heads, height = edge + (tall + gap) * layers;
      canvas.width = sharp * width; canvas.height = sharp * height;
      canvas.style.width = `${width}px`;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Small pictures of ${layers} layers and ${panel.heads} heads`);
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect(), size = width / box.width;
        const head = Math.floor(((event.clientX - box.left) * size - edge) / (wide + gap));
        const layer = Math.floor(((event.clientY - box.top) * size - edge) / (tall + gap));
        if (head < 0 || layer < 0 || head >= panel.heads || layer >= layers) return;
        state.layer = layer; state.head = head;
        slider.value = layer; choice.value = head;
        draw();
      });
      const fixed = grid ? null : panel.layers.flatMap((_, layer) => heads.map((head) => painted(block(layer, head), queries, keys, white, 3)));
      let last = "";
      redraw.push(() => {
        const key = `${grid ? query() : ""} ${state.layer} ${state.head}`;
        if (key === last) return;
        last = key;
        const context = canvas.getContext("2d");
        context.setTransform(sharp, 0, 0, sharp, 0, 0);
        context.clearRect(0, 0, width, height);
        context.imageSmoothingEnabled = false;
        context.font = "11px system-ui, sans-serif"; context.textAlign = "center"; context.textBaseline = "middle";
        for (let layer = 0; layer < layers; layer++) for (const head of heads) {
          const x = edge + (wide + gap) * head, y = edge + (tall + gap) * layer;
          let small = fixed && fixed[layer * panel.heads + head];
          if (grid) {
            const weights = row(layer, head, query());
            small = painted(grid.at.map((at) => (at < 0 ? 0 : weights[at])), rows, columns, white, 3);
          }
          context.drawImage(small, x, y, wide, tall);
          const on = layer === state.layer && (state.head === null || head === state.head);
          context.lineWidth = on ? 2 : 1;
          context.strokeStyle = on ? "#0072b2" : "#e5e5e0";
          context.strokeRect(x - 0.5, y - 0.5, wide + 1, tall + 1);
          context.fillStyle = "#66666c";
          if (!head) context.fillText(layer, edge / 2, y + tall / 2);
          if (!layer) context.fillText(head, x + wide / 2, edge / 2);
        }
      });
    }

    function draw() {
      const weights = row(state.layer, state.head, query());
      const best = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 3).filter((at) => weights[at] > 0);
      const sum = weights.reduce((a, b) => a + b, 0);
      whole = sum > 0.5 && sum < 1.001;
      const name = (names, at) => { // a cell by its row and column, as people count
        const cell = / (\d+),(\d+)$/.exec(names[at]);
        return cell ? `row ${Number(cell[1]) + 1}, column ${Number(cell[2]) + 1}` : `“${names[at].trim() || "·"}”`;
      };
      now.replaceChildren();
      if (queries === 1) make("b", "", now, "It");
      else make("b", "", now, query() === null ? (spoken ? "All words together" : "The mean of all queries") : name(panel.queries.names, query()));
      const verb = queries > 1 && query() === null && spoken ? " look" : " looks";
      if (panel.hard) now.append(`${verb} at ${weights.filter((one) => one > 0).length} of ${keys} cells and at no other`);
      else now.append(`${verb} most at ${best.map((at) => `${name(panel.keys.names, at)} (${amount(weights[at])})`).join("; ") || "nothing"}`);
      const head = panel.heads === 1 ? "" : state.head === null ? `, mean of ${panel.heads} heads` : `, head ${state.head}`;
      const layer = panel.layers[state.layer] === panel.title ? "" : panel.layers[state.layer];
      now.append(make("br"), make("small", "", null, `${layer}${head}`.replace(/^, /, "")));
      mean.disabled = state.query === null;
      const most = weights.reduce((a, b) => Math.max(a, b), 0);
      for (const each of redraw) each(weights, most);
    }
    section.id = `panel-${number}`;
    draw();
  }
}
