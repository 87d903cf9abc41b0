// Draw panels of attention into `place`. `data` comes from overt.viz.browse_page.page_data. With `touch`,
// a click while `removing()` is true removes a part of the input or restores it.
function drawPanels(data, place, hooks) {
  "use strict";
  const { touch = null, removing = () => false } = hooks || {};
  const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const heat = bytes(data.heat), white = bytes(data.white);
  const half = Float32Array.from({ length: 65536 }, (_, n) => { // half precision
    const power = (n >> 10) & 31, part = n & 1023;
    const size = power ? 2 ** (power - 15) * (1 + part / 1024) : 2 ** -24 * part;
    return n >> 15 ? -size : size;
  });
  const make = (kind, name, parent, text) => {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (kind === "button") made.type = kind;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };

  const listen = (node, kind, act) => node.addEventListener(kind, act);
  const describe = (node, text) => node.setAttribute("aria-label", text);

  const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const lay = (one, l, t, w, h) => Object.assign(one.style, { left: `${100 * l}%`, top: `${100 * t}%`, width: `${100 * w}%`, height: `${100 * h}%` });
  const gone = data.removed || { without: [], unsaid: [] };

  // characters of the input text for those of the displayed text, which may have a prompt around it or a mask token in
  // place of a word; null for characters that are not from the input
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
    const state = { ...panel.start, hover: undefined, plain: false, leave: false, region: [] }; // plain: without special tokens, leave: without sinks
    const heads = [...Array(panel.heads).keys()];
    const seen = panel.rows.flatMap((there, at) => (there ? [at] : []));
    const special = panel.keys.blocks.filter((block) => block.kind === "rest").flatMap((block) => block.at);
    const hue = (head) => Math.round(360 * head / panel.heads);

    const sinks = (layer) => panel.sinks[layer] || [];
    // one row of weights; null as query is the mean of all, and so is any head that is not a number. Without
    // sinks, the other weights of each row grow to its sum, as in overt.attribution.sinks.remove_sinks
    const row = (layer, head, query) => {
      const found = new Float64Array(keys);
      const of = typeof head === "number" ? [head] : heads;
      const others = state.plain && panel.same ? seen.filter((q) => !special.includes(q)) : seen;
      const from = query === null ? others : [query];
      const left = state.leave ? sinks(layer) : [];
      for (const h of of) for (const q of from) {
        const at = (layer * panel.heads + h) * queries + q;
        let share = 1 / of.length / from.length;
        if (left.length) {
          let sum = 0, out = 0;
          for (let k = 0; k < keys; k++) sum += half[held[at * keys + k]];
          for (const k of left) out += half[held[at * keys + k]];
          if (sum - out > 1e-9) share *= sum / (sum - out);
        }
        for (let k = 0; k < keys; k++) found[k] += half[held[at * keys + k]] * share;
      }
      if (state.plain) for (const k of special) found[k] = 0;
      for (const k of left) found[k] = 0;
      return found;
    };
    const valuesAt = (places, weights) => places.map((at) => (at < 0 ? 0 : weights[at]));
    const highest = (values) => { // as in overt.viz.photo_overlay: uniform maps stay pale
      let top = 0, sum = 0;
      for (const value of values) { top = Math.max(top, value); sum += value; }
      return Math.max(top, 4 * sum / (values.length || 1));
    };
    const smooth = (values, rows, columns, times) => { // bilinear between cell centres
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
    const canvasOf = (image) => {
      const canvas = make("canvas");
      canvas.width = image.width; canvas.height = image.height;
      canvas.getContext("2d").putImageData(image, 0, 0);
      return canvas;
    };
    const painted = (values, rows, columns, colours, wide, top = highest(values) || 1) => {
      const image = new ImageData(columns, rows);
      for (let n = 0; n < rows * columns; n++) {
        const level = Math.min(255, Math.round(255 * values[n] / top)) * wide;
        for (let c = 0; c < 3; c++) image.data[4 * n + c] = colours[level + c];
        image.data[4 * n + 3] = wide === 4 ? colours[level + 3] : 255;
      }
      return canvasOf(image);
    };

    const section = make("section", "panel", place);
    describe(section, panel.title);
    make("h2", "", section, panel.title);
    if (panel.about) make("p", "about", section, panel.about);
    const form = make("div", "choose", section);
    const field = (name) => make("label", "", form, name);
    const slider = make("input", "layer", field("Layer"));
    slider.type = "range"; slider.min = 0; slider.max = panel.layers.length - 1; slider.value = state.layer;
    describe(slider, `Layer of ${panel.title}`);
    const layered = make("output", "", slider.parentNode);
    const sweep = make("button", "sweep", form, "Play layers");
    const choice = make("select", "head", field("Head"));
    if (panel.heads > 1) make("option", "", choice, "mean of all").value = "";
    if (panel.heads > 1 && !panel.hard) make("option", "", choice, "all, in colors").value = "all";
    for (const head of heads) make("option", "", choice, String(head)).value = head;
    choice.value = state.head === null ? (panel.heads > 1 ? "" : "0") : state.head;
    const switched = make("label", "plain-tokens", form);
    const hide = make("input", "", switched);
    hide.type = "checkbox";
    switched.append("Hide special tokens");
    switched.hidden = !special.length || special.length === keys;
    const spoken = panel.queries.blocks.every((block) => block.kind === "text");
    const mean = make("button", "mean", form, spoken ? "Mean of all words" : "Mean of all queries");
    let playing = 0; // shows each layer in turn, once
    const stop = () => { clearInterval(playing); playing = 0; sweep.textContent = "Play layers"; };
    const open = (layer) => { state.layer = layer; slider.value = layer; draw(); };
    listen(slider, "input", () => { stop(); open(Number(slider.value)); });
    listen(sweep, "click", () => {
      if (playing) return stop();
      sweep.textContent = "Stop";
      open(0);
      playing = setInterval(() => {
        if (!section.isConnected || state.layer === panel.layers.length - 1) stop();
        else open(state.layer + 1);
      }, 700);
    });
    const choose = (head) => { state.head = head; choice.value = head === null ? "" : head; draw(); };
    listen(choice, "change", () => choose(["", "all"].includes(choice.value) ? choice.value || null : Number(choice.value)));
    listen(hide, "change", () => { state.plain = hide.checked; draw(); });
    listen(mean, "click", () => { state.query = null; draw(); });
    slider.parentNode.hidden = sweep.hidden = panel.layers.length === 1; // hide controls without a choice
    choice.parentNode.hidden = panel.heads === 1;
    mean.hidden = queries === 1;
    if (panel.sinks.some((layer) => layer.length)) {
      const label = field(""), box = make("input", "leave", label);
      box.type = "checkbox";
      label.append("Leave out attention sinks");
      label.title = "Keys that take over five times the uniform weight in most rows of this layer; the others grow to the same sum";
      listen(box, "change", () => { state.leave = box.checked; draw(); });
    }
    const now = make("p", "now", section);
    now.setAttribute("aria-live", "polite");
    const deleted = panel.deletion && make("p", "deleted", section);
    const used = make("p", "used", section);
    used.setAttribute("aria-live", "polite");

    // weights that sum to one are shown in percent
    let whole = false;
    const amount = (value) => (whole ? `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %` : value.toPrecision(3));
    const pick = (at) => { state.query = at; state.hover = undefined; draw(); };
    const hover = (at) => { if (at !== state.hover) { state.hover = at; draw(); } };
    const query = () => (state.hover === undefined ? state.query : state.hover);

    const legend = make("p", "legend", section, "Heads: ");
    for (const head of panel.heads > 1 ? heads : []) {
      const one = make("button", "", legend, String(head));
      one.title = `Show head ${head} alone`;
      one.style.setProperty("--head", `hsl(${hue(head)} 85% 50%)`);
      listen(one, "click", () => choose(head));
    }

    const pictures = panel.keys.blocks.filter((block) => block.kind === "grid");
    const frames = pictures.filter((block) => block.frame), video = frames.flatMap((block) => block.at);
    const MIXED = "Each place has the color of the head with most weight there";
    const redraw = [];
    let colored = null; // the weights of every head, while all are shown in colors
    const maps = make("div", "maps", section), chosen = make("div", "chosen", maps);
    const written = panel.chances.length > 0; // the queries are words that the model wrote
    if (!panel.same && queries > 1) {
      const heading = make("h3", "", chosen, written ? "The answer: click a word " : spoken ? "Query: click a word" : "Query");
      if (written) make("small", "", heading, `and its probability${panel.before.length ? ", with the change by the removal" : ""}, in percent`);
      axis(panel.queries, true, false);
      make("h3", "", chosen, spoken ? "Attention of this word" : "Attention of this query");
    }
    axis(panel.keys, panel.same, true);
    const regions = panel.keys.blocks.some((block) => block.kind === "boxes");
    chosen.classList.toggle("words", !pictures.length && !regions);
    if (!pictures.length && !regions && queries > 1) table();
    if (panel.layers.length * panel.heads > 1) tiles();

    // the blocks of an axis: to choose a query from, to show weights on, or both
    function axis(side, from, onto) {
      const place = make("div", "axis", chosen), strip = side.blocks.some((block) => block.frame) ? film(place, onto) : null;
      for (const block of side.blocks) {
        if (block.kind === "grid") picture(side, block, block.frame ? strip : place, from, onto);
        else if (block.kind === "boxes") boxes(side, block, place, from, onto);
        else {
          const inside = make("div", block.kind, place);
          const parts = block.kind === "text" ? block.parts : block.at.map((at) => [side.names[at], at]);
          let start = 0; // pieces cover the whole text, so their lengths give their positions
          for (const [piece, at] of parts) {
            const length = [...piece].length; // in characters, as Python counts
            const range = block.kind === "text" && block.name !== "answer" && !(written && from) ? given([start, start + length]) : null;
            if (at < 0) inside.append(piece);
            else token(inside, piece, at, from, onto, block.kind === "text" ? parts : null, range);
            start += length;
          }
        }
      }
    }

    function ruler(place, scaled = true) {
      const range = make("p", "range", place);
      if (scaled) make("span", "low", range, "0 "), make("span", "scale", range);
      const told = make("span", "told", range);
      return (text) => { range.classList.toggle("plain", Boolean(colored)); told.textContent = text; };
    }

    // frames of a video
    function film(place, onto) {
      const inside = make("div", "film", place), strip = make("div", "strip", inside);
      if (!onto || panel.hard) return strip;
      const tell = ruler(inside);
      redraw.push((weights) => {
        const values = valuesAt(video, weights);
        tell(colored ? MIXED : `${highest(values).toPrecision(3)}, all frames · ${share(values, weights)} is on the video`);
      });
      return strip;
    }

    function token(inside, piece, at, from, onto, among, range) {
      const made = make("button", "token", inside, piece.trim() ? piece : piece || "·");
      made.dataset.at = at;
      if (range && gone.unsaid.some(([a, b]) => a < range[1] && range[0] < b)) made.classList.add("gone");
      listen(made, "click", () => {
        if (touch && removing() && range) touch({ range });
        else if (from) pick(at);
        else select(at);
      });
      if (written && from) chance(made, at);
      if (from) {
        listen(made, "pointerenter", () => hover(at));
        listen(made, "pointerleave", () => hover(undefined));
      }
      redraw.push((weights, most) => {
        if (onto) {
          let top = among ? 0 : most;
          if (among) for (const [, other] of among) if (other >= 0) top = Math.max(top, weights[other]);
          const level = weights[at] / (top || 1);
          made.style.background = colored ? stripes(at, among) : `color-mix(in srgb, var(--mark) ${Math.round(100 * level)}%, transparent)`;
          const sink = sinks(state.layer).includes(at);
          made.classList.toggle("sink", sink);
          made.title = `${piece}: ${amount(weights[at])}${sink ? ", an attention sink" : ""}`;
        } else if (from) { // back from the selected keys to the queries that attend to them
          const level = state.region.length ? state.use[at] / (Math.max(...state.use) || 1) : 0;
          made.style.background = level ? `color-mix(in srgb, var(--mark) ${Math.round(100 * level)}%, transparent)` : "";
        }
        made.setAttribute("aria-pressed", String(from ? query() === at : state.region.includes(at)));
      });
    }

    // a stripe per head under a word, as opaque as its weight is large beside those of the same text
    function stripes(at, among) {
      const shares = colored.map((weights) => {
        const all = among ? among.filter(([, other]) => other >= 0).map(([, other]) => weights[other]) : weights;
        return weights[at] / (Math.max(...all) || 1);
      });
      const part = (n) => `${(100 * n / heads.length).toFixed(2)}%`;
      const colours = heads.map((head) => `hsl(${hue(head)} 85% 50% / ${Math.min(1, shares[head]).toFixed(2)}) ${part(head)} ${part(head + 1)}`);
      return `linear-gradient(90deg, ${colours.join(", ")}) bottom / 100% .3em no-repeat`;
    }

    // a picture in which each pixel has the color of the head with the most weight there
    function mixture(block, times) {
      const [rows, columns] = block.shape, wide = columns * times;
      const fine = colored.map((weights) => smooth(valuesAt(block.at, weights), rows, columns, times));
      const tops = fine.map((values, head) => highest(block.frame ? valuesAt(video, colored[head]) : values) || 1);
      const image = new ImageData(wide, rows * times);
      const part = (n, h) => { // a channel of hsl(hue 85% 50%), from 0 to 1
        const k = (n + h / 30) % 12;
        return 0.5 - 0.425 * Math.max(-1, Math.min(k - 3, 9 - k, 1));
      };
      const colours = heads.map((head) => [0, 8, 4].map((n) => 255 * part(n, hue(head))));
      for (let n = 0; n < fine[0].length; n++) {
        let best = 0;
        for (const head of heads) if (fine[head][n] / tops[head] > fine[best][n] / tops[best]) best = head;
        image.data.set([...colours[best], 217 * fine[best][n] / tops[best]], 4 * n);
      }
      return canvasOf(image);
    }

    // the probability of a written word, and its change by a removal
    function chance(made, at) {
      made.classList.add("written");
      const percent = 100 * panel.chances[at], told = make("small", "", made, percent.toFixed(percent < 9.95 ? 1 : 0));
      if (!panel.before.length) return;
      const change = percent - 100 * panel.before[at];
      make("span", `change ${change < -0.05 ? "down" : change > 0.05 ? "up" : ""}`, told, ` ${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(1)}`);
    }

    // a photo in its aspect ratio, dimmed under heat, with removed parts covered
    function framed(block, place, size, dim) {
      const figure = make("figure", block.photo === undefined ? "plain" : "", place);
      const frame = make("div", "picture", figure);
      frame.style.aspectRatio = `${size[0]} / ${size[1]}`;
      figure.style.setProperty("--aspect", size[0] / size[1]);
      if (block.photo !== undefined) {
        const under = make("div", `photo photo-${block.photo}${dim ? " under" : ""}`, frame);
        if (data.photos) under.style.setProperty("--photo", `url("${data.photos[block.photo]}")`);
      }
      return [figure, frame];
    }
    function covers(frame) {
      for (const [l, t, r, b] of gone.without) {
        const cover = make("div", "gone", frame);
        lay(cover, l, t, r - l, b - t);
      }
    }
    const add = (all) => all.reduce((a, b) => a + b, 0);
    const flat = (values) => { // a pale map is not an error of the page
      const there = values.filter((value) => value > 0), mean = add(there) / (there.length || 1), top = Math.max(0, ...there);
      return there.length > 1 && there.length === values.length && top < 1.5 * mean ? `Nearly uniform: no cell has more than ${(top / mean).toFixed(2)} times the mean` : "";
    };
    const share = (values, weights) => `${(100 * add(values) / (add(weights) || 1)).toFixed(1)} % of the weight${state.plain ? " without special tokens" : ""}`;

    // boxes of a photo: filled by weight, can be chosen or removed
    function boxes(side, block, place, from, onto) {
      const [figure, frame] = framed(block, place, block.size, onto);
      frame.classList.add("boxes");
      const area = ([l, t, r, b]) => (r - l) * (b - t);
      const order = block.boxes.map((_, n) => n).sort((a, b) => area(block.boxes[b]) - area(block.boxes[a]));
      const made = [];
      for (const n of order) { // small boxes on top
        const [l, t, r, b] = block.boxes[n], at = block.at[n];
        if (at < 0 || r <= l || b <= t) continue;
        const one = make("button", "region", frame);
        lay(one, l, t, r - l, b - t);
        const label = make("span", "", one);
        listen(one, "click", () => {
          if (touch && removing() && block.photo !== undefined) touch({ box: [l, t, r, b] });
          else if (from) pick(at);
        });
        made.push([one, label, at]);
      }
      covers(frame);
      const told = onto ? make("p", "range", figure) : null;
      redraw.push((weights) => {
        const values = valuesAt(block.at, weights);
        const top = highest(values) || 1, strong = [...values].sort((a, b) => b - a)[2] || 0;
        for (const [one, label, at] of made) {
          const level = 4 * Math.min(255, Math.round(255 * weights[at] / top));
          const best = onto && weights[at] > 0 && weights[at] >= strong;
          if (onto) one.style.background = `rgba(${heat[level]}, ${heat[level + 1]}, ${heat[level + 2]}, ${(heat[level + 3] / 255).toFixed(3)})`;
          one.classList.toggle("best", best);
          label.textContent = best ? amount(weights[at]) : "";
          const said = onto ? `${side.names[at]}: ${amount(weights[at])}` : side.names[at];
          one.title = said;
          describe(one, said);
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
      lay(canvas, left, top, wide, tall);
      if (block.flip) canvas.style.transform = "scaleX(-1)";
      const mark = make("div", "cell", frame), marks = make("div", "marks", frame);
      covers(frame);
      const put = (one, at) => {
        const [a, b, c, d] = box(at);
        lay(one, a, b, c - a, d - b);
      };
      if (onto) redraw.push(() => { // sinks, and selected cells
        marks.replaceChildren();
        for (const [kind, places] of [["sink", sinks(state.layer)], ["picked", state.region]]) {
          for (const at of places) if (block.at.includes(at)) {
            const one = make("div", kind, marks);
            put(one, at);
            if (kind === "picked") state.boxes.push(box(at));
          }
        }
      });
      if (onto && panel.hard) {
        canvas.classList.add("kept");
        const told = make("p", "range", figure);
        redraw.push((weights) => {
          const values = valuesAt(block.at, weights);
          const context = canvas.getContext("2d"), count = values.filter((value) => value > 0).length;
          context.clearRect(0, 0, canvas.width, canvas.height);
          context.fillStyle = "rgba(24, 24, 28, .8)"; // covers dropped cells
          values.forEach((value, n) => { if (!(value > 0)) context.fillRect((n % columns) * times, Math.floor(n / columns) * times, times, times); });
          told.textContent = `${count} of ${values.length} cells are kept; dark cells were dropped`;
          describe(canvas, `${block.name}: ${told.textContent}`);
        });
      } else if (onto) {
        const uniform = make("span", "uniform", frame); // over the photo, so that nothing moves while pointing
        const tell = ruler(figure, !block.frame);
        redraw.push((weights) => {
          const values = valuesAt(block.at, weights);
          const top = highest(block.frame ? valuesAt(video, weights) : values);
          const context = canvas.getContext("2d");
          context.clearRect(0, 0, canvas.width, canvas.height);
          uniform.textContent = colored || block.frame ? "" : flat(values);
          const fine = colored ? mixture(block, times) : painted(smooth(values, rows, columns, times), rows * times, columns * times, heat, 4, top || 1);
          context.drawImage(fine, 0, 0);
          tell(block.frame ? `${block.name}: ${share(values, weights)}` : colored ? MIXED : `${top.toPrecision(3)} · ${share(values, weights)} is on this image`);
          describe(canvas, `${block.name}: ${share(values, weights)}`);
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
      const box = (at) => { // of a cell, as fractions of the photo
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
        describe(frame, `${block.name}: arrow keys choose a cell`);
        listen(frame, "pointermove", (event) => hover(cell(event)));
        listen(frame, "pointerleave", () => hover(undefined));
        listen(frame, "click", (event) => { const at = cell(event); if (at !== undefined && !remove(at)) pick(at); });
        listen(frame, "keydown", (event) => {
          if (event.key === "Enter" && remove(state.query)) return;
          const move = ARROWS[event.key];
          if (!move) return;
          event.preventDefault();
          const at = Math.max(0, block.at.indexOf(state.query));
          const r = Math.min(rows - 1, Math.max(0, Math.floor(at / columns) + move[0]));
          const c = Math.min(columns - 1, Math.max(0, at % columns + move[1] * (block.flip ? -1 : 1)));
          pick(block.at[r * columns + c]);
        });
      } else if (onto && queries > 1) chooseCell(frame, block, cell, (at) => { if (!remove(at)) select(at); }, mark, put);
      else if (touch && block.photo !== undefined) chooseCell(frame, block, cell, remove, mark, put);
      else frame.style.cursor = "default";
      if (from) redraw.push(() => {
        const at = from && query() !== null ? block.at.indexOf(query()) : -1;
        mark.hidden = at < 0;
        const r = Math.floor(at / columns), c = block.flip ? columns - 1 - (at % columns) : at % columns;
        lay(mark, left + wide * c / columns, top + tall * r / rows, wide / columns, tall / rows);
      });
    }

    // an image without queries: its cells can still be selected or removed
    function chooseCell(frame, block, cell, act, mark, put) {
      const [rows, columns] = block.shape;
      let r = 0, c = 0;
      frame.tabIndex = 0;
      frame.setAttribute("role", "application");
      const say = () => describe(frame, `${block.name}: cell ${r},${c}; arrow keys choose one, Enter ${touch && removing() ? "removes" : "selects"} it`);
      const point = (on) => {
        const at = block.at[r * columns + c];
        mark.hidden = !on || at < 0;
        if (!mark.hidden) put(mark, at);
        say();
      };
      point(false);
      listen(frame, "focus", () => point(frame.matches(":focus-visible")));
      listen(frame, "blur", () => point(false));
      listen(frame, "click", (event) => { const at = cell(event); if (at !== undefined) act(at); });
      listen(frame, "keydown", (event) => {
        const move = ARROWS[event.key];
        if (event.key === "Enter" && block.at[r * columns + c] >= 0) act(block.at[r * columns + c]);
        if (!move) return;
        event.preventDefault();
        r = Math.min(rows - 1, Math.max(0, r + move[0])); c = Math.min(columns - 1, Math.max(0, c + move[1]));
        point(true);
      });
    }

    // select a key, or no longer: which queries attend to the selected ones?
    function select(at) {
      if (queries === 1) return;
      state.region = state.region.includes(at) ? state.region.filter((one) => one !== at) : [...state.region, at];
      draw();
    }
    // does covering the cells of a word's map change its probability more than covering random cells?
    function drawDeletion() {
      const { source, cells, mapped, random } = panel.deletion, word = query();
      const mean = (of) => add(random.map((draw) => draw[of])) / random.length;
      const part = `${cells} cell${cells > 1 ? "s" : ""}`, percent = (value) => `${(100 * value).toFixed(1)} %`;
      if (word === null) {
        const lower = mapped.filter((value, of) => value < mean(of)).length;
        deleted.textContent = `Deletion: ${lower} of ${mapped.length} words become less probable without the ${part} with their largest weights than without ${part} at random (${source}).`;
      } else {
        const draws = random.map((draw) => draw[word]);
        deleted.textContent = `Deletion: “${panel.queries.names[word]}” has ${percent(panel.chances[word])}; ${percent(mapped[word])} without the ${part} with its largest weights; ` +
          `${percent(mean(word))} without ${part} at random (${percent(Math.min(...draws))} to ${percent(Math.max(...draws))} in ${draws.length} draws; ${source}).`;
      }
    }
    function drawUse() {
      used.replaceChildren();
      state.use = [];
      used.hidden = !state.region.length;
      if (used.hidden) return;
      for (let q = 0; q < queries; q++) {
        const weights = row(state.layer, state.head, q);
        state.use.push(add(state.region.map((at) => weights[at])));
      }
      const order = state.use.map((_, q) => q).sort((a, b) => state.use[b] - state.use[a]).slice(0, 3);
      const one = state.region.length === 1;
      used.append(`The selected ${one ? "key is" : `${state.region.length} keys are`} attended to most from `);
      order.forEach((q, n) => {
        used.append(`${n ? "; " : ""}“${panel.queries.names[q].trim() || q}” `);
        make("span", "amount", used, `(${amount(state.use[q])})`);
      });
      used.append(". ");
      const clear = make("button", "clear", used, "Clear selection");
      listen(clear, "click", () => { state.region = []; draw(); });
    }

    function block(layer, head) { // all rows of one layer and head
      const found = new Float64Array(queries * keys);
      for (let q = 0; q < queries; q++) found.set(row(layer, head, q), q * keys);
      return found;
    }

    function table() {
      const place = make("div", "overview", maps);
      make("h3", "", place, "Rows: queries; columns: keys");
      const named = Math.max(queries, keys) <= 80, side = named ? 92 : 0;
      const unit = Math.max(2, Math.min(18, Math.floor(1050 / keys)));
      const canvas = make("canvas", "table", place), sharp = 2;
      canvas.width = sharp * (side + unit * keys); canvas.height = sharp * (side + unit * queries);
      canvas.style.width = `${side + unit * keys}px`;
      canvas.setAttribute("role", "img");
      describe(canvas, `Weights of ${queries} queries on ${keys} keys`);
      const over = (event) => {
        const box = canvas.getBoundingClientRect(), size = canvas.width / sharp / box.width;
        const q = Math.floor(((event.clientY - box.top) * size - side) / unit);
        return q >= 0 && q < queries ? q : undefined;
      };
      listen(canvas, "pointermove", (event) => hover(over(event)));
      listen(canvas, "pointerleave", () => hover(undefined));
      listen(canvas, "click", (event) => { const at = over(event); if (at !== undefined) pick(at); });
      let last = "", kept = null;
      redraw.push(() => {
        const key = `${state.layer} ${state.head} ${state.plain} ${state.leave}`;
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
      let grid = pictures[0];
      if (frames.length) { // side by side
        const [r, c] = grid.shape, line = (n) => frames.flatMap((block) => block.at.slice(n * c, n * c + c));
        grid = { shape: [r, c * frames.length], at: [...Array(r).keys()].flatMap(line) };
      }
      const layers = panel.layers.length;
      const place = make("div", "overview", maps);
      make("h3", "", place, "Rows: layers; columns: heads; each on its own scale");
      const [rows, columns] = grid ? grid.shape : [queries, keys];
      const room = (grid ? 610 : 1100) / panel.heads, gap = 4, edge = 26; // beside a photo
      const unit = Math.min(room - gap, 84) / Math.max(rows, columns);
      const wide = Math.max(6, unit * columns), tall = Math.max(6, unit * rows), sharp = 2;
      const canvas = make("canvas", "tiles", place);
      const width = edge + (wide + gap) * panel.heads, height = edge + (tall + gap) * layers;
      canvas.width = sharp * width; canvas.height = sharp * height;
      canvas.style.width = `${width}px`;
      canvas.setAttribute("role", "img");
      describe(canvas, `Thumbnails of ${layers} layers and ${panel.heads} heads`);
      listen(canvas, "click", (event) => {
        const box = canvas.getBoundingClientRect(), size = width / box.width;
        const head = Math.floor(((event.clientX - box.left) * size - edge) / (wide + gap));
        const layer = Math.floor(((event.clientY - box.top) * size - edge) / (tall + gap));
        if (head < 0 || layer < 0 || head >= panel.heads || layer >= layers) return;
        stop();
        state.layer = layer; slider.value = layer;
        choose(head);
      });
      let last = "", fixed = null, without = null; // matrices of a text depend on no query
      redraw.push(() => {
        const key = `${grid ? query() : ""} ${state.layer} ${state.head} ${state.plain} ${state.leave}`;
        if (key === last) return;
        last = key;
        if (!grid && without !== `${state.plain} ${state.leave}`) {
          without = `${state.plain} ${state.leave}`;
          fixed = panel.layers.flatMap((_, layer) => heads.map((head) => painted(block(layer, head), queries, keys, white, 3)));
        }
        const context = canvas.getContext("2d");
        context.setTransform(sharp, 0, 0, sharp, 0, 0);
        context.clearRect(0, 0, width, height);
        context.imageSmoothingEnabled = false;
        const letter = Math.min(22, 11 * Math.max(1, width / (canvas.clientWidth || width))); // readable on a phone
        context.font = `${letter}px system-ui, sans-serif`; context.textAlign = "center"; context.textBaseline = "middle";
        for (let layer = 0; layer < layers; layer++) for (const head of heads) {
          const x = edge + (wide + gap) * head, y = edge + (tall + gap) * layer;
          let small = fixed && fixed[layer * panel.heads + head];
          if (grid) {
            const weights = row(layer, head, query());
            small = painted(valuesAt(grid.at, weights), rows, columns, white, 3);
          }
          context.drawImage(small, x, y, wide, tall);
          const on = layer === state.layer && (typeof state.head !== "number" || head === state.head);
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
      colored = state.head === "all" ? heads.map((head) => row(state.layer, head, query())) : null;
      legend.hidden = !colored;
      layered.value = `${state.layer} of 0–${panel.layers.length - 1}`;
      const best = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 3).filter((at) => weights[at] > 0);
      const sum = weights.reduce((a, b) => a + b, 0);
      whole = sum > 0.5 && sum < 1.001;
      const name = (names, at) => { // rows and columns counted from one
        const cell = /^(.*) (\d+),(\d+)$/.exec(names[at]);
        const where = cell && pictures.length > 1 ? `${cell[1]}, ` : "";
        return cell ? `${where}row ${Number(cell[2]) + 1}, column ${Number(cell[3]) + 1}` : `“${names[at].trim() || "·"}”`;
      };
      now.replaceChildren();
      if (queries === 1) make("b", "", now, "The model");
      else make("b", "", now, query() === null ? (spoken ? "The mean of all words" : "The mean of all queries") : name(panel.queries.names, query()));
      if (panel.hard) now.append(` attends to ${weights.filter((one) => one > 0).length} of ${keys} cells and to no other`);
      else {
        now.append(" attends most to ", best.length ? "" : "nothing");
        best.forEach((at, n) => {
          now.append(`${n ? "; " : ""}${name(panel.keys.names, at)} `);
          make("span", "amount", now, `(${amount(weights[at])})`);
        });
      }
      const head = panel.heads === 1 ? "" : typeof state.head === "number" ? `, head ${state.head}` : `, mean of ${panel.heads} heads`;
      const layer = panel.layers[state.layer] === panel.title ? "" : panel.layers[state.layer];
      now.append(make("br"), make("small", "", null, `${layer}${head}`.replace(/^, /, "")));
      mean.disabled = state.query === null;
      const most = weights.reduce((a, b) => Math.max(a, b), 0);
      drawUse();
      if (deleted) drawDeletion();
      state.boxes = [];
      for (const each of redraw) each(weights, most);
      if (state.boxes.length && touch && data.panels.length) {
        const again = make("button", "again", used, "Remove these cells and run again");
        const boxes = state.boxes;
        listen(again, "click", () => touch({ boxes }));
      }
    }
    section.id = `panel-${number}`;
    draw();
  }
}
