{% include "panels.js" %}

(function () {
  "use strict";
  const at = (id) => document.getElementById(id);
  const make = (kind, name, parent, text) => {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const root = document.documentElement, theme = at("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();
  theme.hidden = false;

  const state = { models: [], picture: null, truth: null, without: [], unsaid: [], before: new Map(), asked: 0, stop: new AbortController() };

  async function call(path, body, signal) {
    const sent = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
    let found;
    try { found = await fetch(path, sent); } catch { throw new Error("No response from the server: is it still running?"); }
    if (found.ok) return found;
    const told = await found.json().catch(() => ({}));
    throw new Error(told.error || `The server responded with status ${found.status}.`);
  }
  const problem = (text) => { at("problem").textContent = text || ""; at("problem").hidden = !text; };

  const NAMES = {
    attention: "attention", values: "attention times value norms", gradient: "gradient of the answer",
    rollout: "attention rollout", relevance: "relevance through all layers", search: "search over masked inputs",
  };

  // the request

  const last = (name) => name.split("/").pop();
  const short = (name) => // the last part of a path, if no other model has it
    name.includes(":") || state.models.filter((one) => last(one.name) === last(name)).length > 1 ? name : last(name);
  const about = (name) => state.models.find((one) => one.name === name) || { maps: {} };
  function show(picture) {
    state.picture = picture;
    at("stage").hidden = at("clear").hidden = !picture;
    at("boxes").value = "";
    draw();
    if (picture) { at("preview").src = picture; at("preview").alt = "The input image"; } else at("preview").removeAttribute("src");
    reset();
  }
  function reset() { state.without = []; state.unsaid = []; state.truth = null; state.before.clear(); told(); outdate(); }

  // an answer to an earlier input stays readable, dimmed
  function outdate(status = "The input has changed: press Run.") {
    if (!at("columns").childElementCount) return;
    at("columns").classList.add("outdated");
    at("busy").textContent = status;
  }

  // boxes: entered in the field, or drawn over the image, which fills the field

  function boxes() {
    const found = at("boxes").value.split(/[;\n]/).filter((one) => one.trim()).map((one) => one.trim().split(/[\s,]+/).map((part) => Number(part) / 100));
    if (found.some((one) => one.length !== 4 || one.some((side) => !(side >= 0 && side <= 1)) || one[0] >= one[2] || one[1] >= one[3])) {
      throw new Error("A box needs four numbers from 0 to 100: left, top, right and bottom, as in “10 20 50 60; 55 10 90 40”.");
    }
    return found;
  }
  function draw(more) {
    at("drawn").replaceChildren();
    let found = [];
    try { found = boxes(); } catch { /* reported on submit */ }
    for (const [l, t, r, b] of [...found, ...(more ? [more] : [])]) {
      const made = make("div", "", at("drawn"));
      Object.assign(made.style, { left: `${100 * l}%`, top: `${100 * t}%`, width: `${100 * (r - l)}%`, height: `${100 * (b - t)}%` });
    }
  }
  at("boxes").addEventListener("input", () => { draw(); reset(); });
  let from = null;
  const place = (event) => {
    const frame = at("preview").getBoundingClientRect(), inside = (value) => Math.min(1, Math.max(0, value));
    return [inside((event.clientX - frame.left) / frame.width), inside((event.clientY - frame.top) / frame.height)];
  };
  const between = ([a, b], [c, d]) => [Math.min(a, c), Math.min(b, d), Math.max(a, c), Math.max(b, d)];
  at("stage").addEventListener("pointerdown", (event) => {
    if (!about(at("model").value).boxed) return;
    event.preventDefault();
    from = place(event);
    at("stage").setPointerCapture(event.pointerId);
  });
  at("stage").addEventListener("pointermove", (event) => { if (from) draw(between(from, place(event))); });
  at("stage").addEventListener("pointerup", (event) => {
    if (!from) return;
    const box = between(from, place(event));
    from = null;
    if (box[2] - box[0] > 0.02 && box[3] - box[1] > 0.02) {
      const one = box.map((side) => (100 * side).toFixed(1)).join(" ");
      at("boxes").value = [at("boxes").value.trim(), one].filter(Boolean).join("; ");
      reset();
    }
    draw();
  });
  function told() {
    const parts = [];
    if (state.without.length) parts.push(`${state.without.length} part${state.without.length > 1 ? "s" : ""} of the image`);
    if (state.unsaid.length) parts.push(`${state.unsaid.length} word${state.unsaid.length > 1 ? "s" : ""}`);
    at("removed").textContent = parts.length ? `Removed: ${parts.join(" and ")}.` : "Turn it on, then click a part of an image or a word.";
    at("restore").disabled = !parts.length;
  }
  function take(file) {
    if (!file) return;
    if (!["image/jpeg", "image/png", "image/webp"].includes(file.type)) return problem("Unsupported format: use a JPEG, PNG or WEBP image.");
    if (file.size > 8 * 2 ** 20) return problem("The image is larger than 8 MiB: make it smaller.");
    const reader = new FileReader();
    reader.onload = () => { problem(""); show(reader.result); };  // nothing is sent before submit
    reader.onerror = () => problem("The file cannot be read.");
    reader.readAsDataURL(file);
  }
  at("file").addEventListener("change", () => { take(at("file").files[0]); at("file").value = ""; });
  at("clear").addEventListener("click", () => show(null));
  const drop = at("drop");
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); take(event.dataTransfer.files[0]); });
  document.addEventListener("paste", (event) => {
    const found = [...event.clipboardData.items].find((one) => one.type.startsWith("image/"));
    if (found) take(found.getAsFile());
  });
  at("text").addEventListener("input", reset);
  at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("ask").requestSubmit(); }
  });

  async function chosen() {
    const known = about(at("model").value);
    at("looks").hidden = known.looks === false;
    at("reads").hidden = known.reads === false;
    at("boxed").hidden = !known.boxed;
    at("stage").classList.toggle("drawing", Boolean(known.boxed));
    at("text-label").textContent = known.wants || "Question or text";
    at("text").placeholder = known.hint || "";
    const before = at("map").value;
    at("map").replaceChildren();
    for (const name of Object.keys(known.maps)) make("option", "", at("map"), NAMES[name] || name).value = name;
    at("map").value = known.maps[before] ? before : "attention";
    offer();
    explain();
    at("examples").hidden = !known.examples;
    state.before.clear();
    if (!known.examples) return at("shelf").replaceChildren();
    try {
      const found = await (await call(`/api/examples?model=${encodeURIComponent(known.name)}`)).json();
      if (known.name !== at("model").value) return;
      at("shelf").replaceChildren();
      for (const one of found) {
        const button = make("button", "", at("shelf"));
        button.type = "button";
        if (one.picture) { const image = make("img", "", button); image.src = one.picture; image.alt = ""; }
        if (one.text) make("span", "", button, one.text).title = one.text;
        button.addEventListener("click", () => {
          show(one.picture);
          if (known.boxed) at("boxes").value = one.boxes.map((box) => box.map((side) => (100 * side).toFixed(1)).join(" ")).join("; ");
          draw();
          at("text").value = one.text || ""; state.truth = one.truth; at("ask").requestSubmit();
        });
      }
    } catch (error) { problem(error.message); }
  }
  // what an answer can be compared with: other methods of the same model, or other models
  function offer() {
    const known = about(at("model").value), before = at("other").value, other = at("other");
    other.replaceChildren();
    make("option", "", other, "none").value = "";
    const group = (label, found) => {
      if (!found.length) return;
      const made = make("optgroup", "", other);
      made.label = label;
      for (const [value, name] of found) make("option", "", made, name).value = value;
    };
    const methods = Object.keys(known.maps).filter((name) => name !== at("map").value);
    group("another method", methods.map((name) => [`method ${name}`, NAMES[name] || name]));
    group("another model", state.models.filter((one) => one !== known).map((one) => [`model ${one.name}`, short(one.name)]));
    other.value = before;
    if (other.selectedIndex < 0) other.value = "";
  }
  const explain = () => { at("map-about").textContent = about(at("model").value).maps[at("map").value] || ""; };
  at("map").addEventListener("change", () => { offer(); explain(); });
  at("model").addEventListener("change", chosen);
  for (const id of ["map", "model", "other", "layer", "head", "query", "deletion"]) at(id).addEventListener("input", () => outdate());

  function question(model, method) {
    const known = about(model), value = (id) => at(id).value.trim() || null;
    const asked = { model, map: known.maps[method] ? method : "attention", without: state.without, unsaid: state.unsaid };
    if (known.looks !== false && state.picture) asked.picture = state.picture;
    if (known.reads !== false && at("text").value.trim()) asked.text = at("text").value;
    if (known.boxed) asked.boxes = boxes();
    if (at("deletion").checked) asked.deletion = true;
    asked.layer = value("layer"); asked.query = value("query");
    asked.head = value("head") === null ? null : Number(value("head"));
    return asked;
  }

  // the responses

  at("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(started); });
  let started = false; // the first example is answered without being requested
  async function ask(scroll) {
    const number = ++state.asked;
    state.stop.abort(); // the server cancels abandoned requests
    state.stop = new AbortController();
    const pairs = [[at("model").value, at("map").value]], other = at("other").value;
    if (other.startsWith("method ")) pairs.push([pairs[0][0], other.slice(7)]);
    else if (other) pairs.push([other.slice(6), pairs[0][1]]);
    problem("");
    at("go").disabled = true;
    outdate();
    at("columns").setAttribute("aria-busy", "true");
    at("busy").textContent = "Running ...";
    try {
      const asked = pairs.map(([model, method]) => question(model, method));
      const found = await Promise.all(asked.map(async (one) => (await call("/api/ask", one, state.stop.signal)).json()));
      if (number !== state.asked) return;
      at("columns").replaceChildren();
      at("columns").classList.remove("outdated");
      at("start").hidden = true;
      at("tools").hidden = false;
      found.forEach((one, n) => reply(one, asked[n], pairs[0][0] === (pairs[1] || [])[0]));
      told();
      at("busy").textContent = `Answered in ${Math.max(...found.map((one) => one.seconds)).toFixed(2)} s.`;
      if (scroll && at("replies").getBoundingClientRect().top > innerHeight / 2) at("replies").scrollIntoView(); // on a phone
    } catch (error) {
      if (number !== state.asked) return;
      problem(error.message);
      at("busy").textContent = "";
      if (scroll) at("problem").scrollIntoView({ block: "nearest" });
    } finally {
      if (number === state.asked) { at("go").disabled = false; at("columns").removeAttribute("aria-busy"); }
    }
  }

  function reply(found, asked, methods) { // methods: of one model, so that the method is the title
    const box = make("section", "reply", at("columns"));
    box.setAttribute("aria-label", `Answer of ${found.model}`);
    const top = make("div", "heading", box), method = NAMES[asked.map] || asked.map;
    make("h2", "", top, methods ? method : short(found.model));
    const whole = !asked.without.length && !asked.unsaid.length;
    if (whole) state.before.set(found.model, new Map(found.answers.map((one) => [one.name, one.chance])));
    const before = whole ? null : state.before.get(found.model);
    const first = found.answers[0], known = about(found.model);
    if (first) {
      const said = make("p", "said", top, known.writes || first.chance === null ? "It writes " : "It answers ");
      make("b", "", said, first.name);
      if (state.truth && !known.writes) make("span", first.name === state.truth ? "right" : "wrong", said, first.name === state.truth ? " ✓ right" : ` ✗ correct: ${state.truth}`);
      const was = before && [...before.keys()][0];
      if (was && was !== first.name) make("p", "was", box, `Without removal it was “${was}”.`);
    }
    const list = make("ol", "chances", box);
    const longest = Math.max(0, ...found.answers.map((one) => one.name.length)); // equal columns, so that bars compare
    list.style.setProperty("--wide", `${longest + 11}ch`);
    for (const one of found.answers) {
      if (found.answers.length === 1 && one.chance === null) break; // it is in the title already
      const line = make("li", "", list);
      make("span", "", line, found.answers.length === 1 ? "probability" : one.name);
      const right = make("span", "", line, one.chance === null ? "" : `${(100 * one.chance).toFixed(1)} %`);
      if (one.chance !== null) line.style.setProperty("--chance", `${100 * one.chance}%`);
      const was = before && before.get(one.name);
      if (was !== null && was !== undefined && one.chance !== null) {
        const change = 100 * (one.chance - was);
        make("span", `change ${change < -0.05 ? "down" : change > 0.05 ? "up" : ""}`, right, ` (${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(1)})`);
      }
    }
    drawPanels(found.view, box, { touch, removing: () => at("removing").checked });
    if (!found.view.panels.length) make("p", "empty", box, "This model has no attention. Try the method “gradient”.");
    for (const note of found.notes) if (!/^It (answers|writes)/.test(note)) make("p", "small", box, note);
    const actions = make("div", "actions", box);
    const copy = make("button", "", actions, "Copy as Python"), save = make("button", "", actions, "Download image");
    copy.type = save.type = "button";
    const lines = make("div", "", box), code = make("pre", "", lines);
    make("code", "", code, found.code);
    lines.hidden = true;
    if (asked.picture) { // read by the code
      const link = make("a", "small", lines, "Save photo.png for this code");
      link.href = asked.picture; link.download = "photo.png";
    }
    copy.addEventListener("click", async () => {
      lines.hidden = false;
      try { await navigator.clipboard.writeText(found.code); copy.textContent = "Copied"; } catch { copy.textContent = "See below"; }
    });
    save.disabled = !found.view.panels.length;
    save.addEventListener("click", async () => {
      try {
        const address = URL.createObjectURL(await (await call("/api/picture", asked)).blob());
        const link = make("a", "", document.body); link.href = address; link.download = "attention.png"; link.click(); link.remove();
        setTimeout(() => URL.revokeObjectURL(address), 10000);
      } catch (error) { problem(error.message); }
    });
  }

  function touch({ box, boxes, range }) {
    const same = (a, b) => a.every((value, n) => Math.abs(value - b[n]) < 1e-6);
    const toggle = (list, one) => (list.some((other) => same(other, one)) ? list.filter((other) => !same(other, one)) : [...list, one]);
    for (const one of boxes || []) if (!state.without.some((other) => same(other, one))) state.without.push(one);
    if (box) state.without = toggle(state.without, box);
    if (range) state.unsaid = toggle(state.unsaid, range);
    told();
    ask();
  }
  at("removing").addEventListener("change", () => at("columns").classList.toggle("removing", at("removing").checked));
  at("restore").addEventListener("click", () => { state.without = []; state.unsaid = []; told(); ask(); });

  (async () => {
    try {
      state.models = await (await call("/api/models")).json();
      const broken = state.models.filter((one) => one.problem);
      at("broken").textContent = broken.map((one) => `${one.name} cannot be loaded: ${one.problem}`).join(" ");
      at("broken").hidden = !broken.length;
      state.models = state.models.filter((one) => !one.problem);
      if (!state.models.length) return;
      for (const one of state.models) make("option", "", at("model"), short(one.name)).value = one.name;
      at("model").value = state.models[0].name;
      await chosen();
      const first = at("shelf").querySelector("button");
      if (first && !state.picture && !at("text").value) first.click(); // start with an answered example
      started = true;
    } catch (error) { problem(error.message); }
  })();
})();
