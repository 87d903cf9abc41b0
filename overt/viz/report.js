(function () {
  "use strict";
  const root = document.documentElement;
  const keep = { // local storage may be blocked for a page opened from a file
    get(name) { try { return localStorage.getItem(name); } catch (error) { return null; } },
    set(name, value) { try { localStorage.setItem(name, value); } catch (error) { /* optional */ } },
  };

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  const theme = keep.get("overt-theme");
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    keep.set("overt-theme", root.dataset.theme);
    label();
  });
  system.addEventListener("change", label);
  label();
  button.hidden = false;

  // --- maps with readable cells, and clickable words

  // "rows columns largest mean base64", 8 or 16 bits per cell
  function unpack(text) {
    const [rows, columns, top, average, data] = text.split(" ");
    const bytes = atob(data), wide = bytes.length > rows * columns;
    const level = (at) => wide ? (bytes.charCodeAt(2 * at) + 256 * bytes.charCodeAt(2 * at + 1)) / 65535 : bytes.charCodeAt(at) / 255;
    const value = (at) => level(at) * Number(top);
    return { rows: Number(rows), columns: Number(columns), even: Number(average), top: Number(top), value };
  }
  const spread = (text, count) => {
    const found = text ? text.split(",").map((pair) => pair.split(" ").map(Number)) : [];
    return found.length === count ? found : Array.from({ length: count }, (_, at) => [100 * at / count, 100 * (at + 1) / count]);
  };
  const short = (value) => value >= 0.1 ? value.toFixed(3) : Number(value.toPrecision(3)).toString();

  // Draw a map over its photo: bilinear between cell centres, transparent outside.
  function paint(map, xs, ys, wide, high) {
    const hex = document.getElementById("cards").dataset.palette, canvas = document.createElement("canvas");
    const side = 96, width = Math.round(side * Math.min(1, wide / high)), height = Math.round(side * Math.min(1, high / wide));
    canvas.width = width; canvas.height = height;
    const context = canvas.getContext("2d"), picture = context.createImageData(width, height);
    const most = Math.max(map.top, 4 * map.even) || 1;
    const along = (pairs, count) => Array.from({ length: count }, (_, pixel) => {
      const at = 100 * (pixel + 0.5) / count, first = Math.min(...pairs.flat()), last = Math.max(...pairs.flat());
      if (at < first || at > last) return null;
      const step = pairs.length > 1 ? (pairs[1][0] + pairs[1][1] - pairs[0][0] - pairs[0][1]) / 2 : 1;
      const exact = (at - (pairs[0][0] + pairs[0][1]) / 2) / step;
      const place = Math.min(pairs.length - 1, Math.max(0, exact)), low = Math.floor(place);
      return [low, Math.min(pairs.length - 1, low + 1), place - low];
    });
    const across = along(xs, width), down = along(ys, height);
    for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
      if (!across[x] || !down[y]) continue;
      const [a, b, s] = across[x], [c, d, t] = down[y], at = (r, q) => map.value(r * map.columns + q);
      const value = (1 - t) * ((1 - s) * at(c, a) + s * at(c, b)) + t * ((1 - s) * at(d, a) + s * at(d, b));
      const level = Math.min(255, Math.round(255 * value / most));
      for (let channel = 0; channel < 4; channel++) picture.data[4 * (y * width + x) + channel] = parseInt(hex.substr(8 * level + 2 * channel, 2), 16);
    }
    context.putImageData(picture, 0, 0);
    return canvas.toDataURL();
  }

  function setUp(view) {
    const frame = view.querySelector(":scope > .frame"), reading = view.querySelector(".reading");
    const words = Array.from(view.querySelectorAll("button.word"));
    const levels = Array.from(view.querySelectorAll(".level"));
    let heat = frame && frame.querySelector("img.heat"), photo = frame && frame.querySelector(".photo");
    const rest = { heat: heat && heat.src, alt: heat && heat.alt };
    const range = view.querySelector(".range"), topWeight = view.querySelector(".top-weight");
    const restTop = topWeight ? topWeight.textContent : "", hadRange = range && !range.hidden;
    let map = null, xs = [], ys = [], row = 0, column = 0, marker = null;

    function show(cells, columns, rows) { // set the current map
      map = cells ? unpack(cells) : null;
      if (!map) return;
      xs = spread(columns, map.columns);
      ys = spread(rows, map.rows);
      row = Math.min(row, map.rows - 1); column = Math.min(column, map.columns - 1);
    }
    function read() {
      if (!map) return;
      const value = map.value(row * map.columns + column);
      const times = map.even > 0 ? `, ${(value / map.even).toFixed(1)} × uniform` : "";
      reading.textContent = `row ${row + 1}, column ${column + 1}: ${short(value)}${times}`;
      marker.style.cssText = `left:${Math.min(...xs[column])}%;top:${Math.min(...ys[row])}%;width:${Math.abs(xs[column][1] - xs[column][0])}%;height:${Math.abs(ys[row][1] - ys[row][0])}%`;
      marker.hidden = false;
    }
    function leave() { if (marker) marker.hidden = true; reading.textContent = said; }
    let said = ""; // text while nothing is pointed at

    if (frame && frame.dataset.columns && reading) {
      marker = document.createElement("span");
      marker.className = "cell"; marker.hidden = true;
      frame.append(marker);
      show(frame.dataset.cells, frame.dataset.columns, frame.dataset.rows);
      const inside = (pairs, at) => pairs.findIndex(([a, b]) => at >= Math.min(a, b) && at < Math.max(a, b));
      const point = (event) => {
        if (!map) return;
        const box = frame.getBoundingClientRect();
        const c = inside(xs, 100 * (event.clientX - box.left) / box.width);
        const r = inside(ys, 100 * (event.clientY - box.top) / box.height);
        if (r < 0 || c < 0) { leave(); return; }
        row = r; column = c; read();
      };
      frame.addEventListener("pointermove", point);
      frame.addEventListener("pointerdown", point);
      frame.addEventListener("pointerleave", leave);
      frame.addEventListener("focus", read);
      frame.addEventListener("blur", leave);
      frame.tabIndex = 0;
      frame.setAttribute("role", "application");
      frame.setAttribute("aria-label", `Map of ${frame.dataset.name}. Arrow keys read its cells.`);
      frame.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (!move || !map) return;
        event.preventDefault();
        row = Math.min(map.rows - 1, Math.max(0, row + move[0]));
        column = Math.min(map.columns - 1, Math.max(0, column + move[1]));
        read();
      });
    }

    function draw(source, alt) {
      if (!frame) return;
      if (!heat && source) {
        heat = document.createElement("img");
        heat.className = "heat";
        photo.after(heat);
      }
      if (!heat) return;
      heat.hidden = !source;
      if (source) heat.src = source;
      heat.alt = alt || "";
      photo.classList.toggle("under", Boolean(source));
    }
    const choices = [...words, ...levels.map((level) => level.querySelector("button"))].filter(Boolean);
    function press(button) {
      const on = button.getAttribute("aria-pressed") !== "true";
      for (const other of choices) other.setAttribute("aria-pressed", "false");
      const from = button.closest(".level") || button;
      const data = on ? from.dataset : frame ? frame.dataset : {};
      said = "";
      if (on) {
        button.setAttribute("aria-pressed", "true");
        const name = from.dataset.name || button.textContent.trim();
        if (from.dataset.weight) {
          const weight = Number(from.dataset.weight);
          said = `“${name}”: ${short(weight)}, ${(weight / Number(from.dataset.even)).toFixed(1)} × uniform`;
        } else said = `the map of “${name}”`;
      }
      const own = on && Boolean(from.dataset.cells) && Boolean(frame);
      if (frame && frame.dataset.columns && (own || !on)) show(data.cells, data.columns || frame.dataset.columns, data.rows || frame.dataset.rows);
      const drawn = own && from !== button ? from.querySelector("img.heat") : null;
      if (drawn) draw(drawn.src, drawn.alt);
      else if (own && map) draw(paint(map, xs, ys, frame.clientWidth, frame.clientHeight), from.dataset.alt);
      else draw(rest.heat, rest.alt);
      if (frame && frame.dataset.columns) {
        if (topWeight) {
          topWeight.textContent = own && map ? short(Math.max(map.top, 4 * map.even)) : restTop;
          range.hidden = !own && !hadRange;
        }
      }
      if (reading) reading.textContent = said;
    }
    for (const level of levels) { // images of levels become buttons
      if (!level.dataset.cells) continue;
      const button = document.createElement("button");
      button.type = "button"; button.className = "choose";
      button.setAttribute("aria-pressed", "false");
      button.append(...level.childNodes);
      level.append(button);
      choices.push(button);
    }
    for (const choice of choices) choice.addEventListener("click", () => press(choice));
    // one tab stop per row of words; arrow keys move within it
    for (const list of view.querySelectorAll(".words")) {
      const own = Array.from(list.querySelectorAll("button.word"));
      own.forEach((word, at) => {
        word.tabIndex = at ? -1 : 0;
        word.addEventListener("keydown", (event) => {
          const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
          const next = step && own[at + step];
          if (!next) return;
          event.preventDefault();
          word.tabIndex = -1; next.tabIndex = 0; next.focus();
        });
      });
    }
  }
  for (const view of document.querySelectorAll(".view")) setUp(view);

  document.addEventListener("keydown", (event) => { // move between samples
    const step = { j: 1, k: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("select, input, textarea")) return;
    const shown = Array.from(document.querySelectorAll(".card:not([hidden])"));
    const here = shown.indexOf(event.target.closest(".card"));
    const next = shown[here < 0 ? (step > 0 ? 0 : shown.length - 1) : here + step];
    if (next) { next.focus(); next.scrollIntoView({ block: "start" }); }
  });

  const form = document.getElementById("filters");
  if (!form) return;
  const gallery = document.getElementById("cards");
  const cards = Array.from(gallery.querySelectorAll(".card"), (card) => ({
    card,
    number: Number(card.dataset.number),
    group: card.dataset.group,
    views: Array.from(card.querySelectorAll(".view"), (view) => ({
      run: view.dataset.run,
      right: view.dataset.right === "" ? null : view.dataset.right === "1",
      inside: view.dataset.inside === "" ? null : Number(view.dataset.inside),
      faithful: view.dataset.faithful === "" ? null : Number(view.dataset.faithful),
    })),
  }));
  const chosen = (id) => { const field = document.getElementById(id); return field ? field.value : ""; };
  const known = (values) => values.filter((value) => value !== null);
  // "yes": all known values are true; "no": all are false; "mixed": some of each.
  const verdict = (values) =>
    !values.length ? "" : values.every(Boolean) ? "yes" : values.some(Boolean) ? "mixed" : "no";
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  // One run is right and all other answers are wrong.
  const alone = (views, run) => views.some((view) => view.run === run && view.right)
    && views.some((view) => view.run !== run && view.right === false)
    && !views.some((view) => view.run !== run && view.right);

  const FIRST = 12; // samples before "more"; all of them if an address names one
  let most = location.hash.startsWith("#sample-") ? cards.length : FIRST;
  const more = document.getElementById("more-samples");

  function apply() {
    const run = chosen("f-run"), answer = chosen("f-answer"), inside = chosen("f-inside");
    const group = chosen("f-group"), order = chosen("f-order");
    for (const item of cards) {
      const views = item.views.filter((view) => !run || view.run === run);
      const right = verdict(known(views.map((view) => view.right)));
      const scores = known(views.map((view) => view.inside));
      const on = verdict(scores.map((score) => score >= 0.5));
      const ranked = order.startsWith("faithful") ? known(views.map((view) => view.faithful)) : scores;
      item.score = ranked.length ? mean(ranked) : null;
      const visible = views.length > 0
        && (!answer || (answer.startsWith("only-") ? alone(item.views, answer.slice(5))
          : right === { right: "yes", wrong: "no", mixed: "mixed" }[answer]))
        && (!inside || on === { on: "yes", off: "no", mixed: "mixed" }[inside])
        && (!group || item.group === group);
      item.visible = visible;
    }
    const sorted = cards.slice().sort((a, b) => {
      if (!order || a.score === b.score) return a.number - b.number;
      if (a.score === null) return 1;
      if (b.score === null) return -1;
      return order.endsWith("up") ? a.score - b.score : b.score - a.score;
    });
    gallery.append(...sorted.map((item) => item.card));
    const matching = sorted.filter((item) => item.visible);
    for (const item of sorted) item.card.hidden = !matching.slice(0, most).includes(item);
    const shown = Math.min(most, matching.length);
    more.hidden = shown === matching.length;
    more.textContent = `${matching.length - shown} more samples`;
    for (const layer of ["heat", "outline"]) {
      const box = document.getElementById(`f-${layer}`);
      gallery.classList.toggle(`no-${layer}`, box !== null && !box.checked);
    }
    document.getElementById("count").textContent = `${shown} of ${cards.length} shown`;
    document.getElementById("none").hidden = shown > 0;
  }

  more.addEventListener("click", () => {
    const next = document.querySelectorAll(".card:not([hidden])").length;
    most = cards.length;
    apply();
    document.querySelectorAll(".card:not([hidden])")[next].focus();
  });
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  apply();
})();
