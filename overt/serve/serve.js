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

  const state = { models: [], picture: null, truth: null, without: [], unsaid: [], before: new Map(), asked: 0 };

  async function call(path, body) {
    const sent = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    let found;
    try { found = await fetch(path, sent); } catch { throw new Error("The server does not answer; is it still running?"); }
    if (found.ok) return found;
    const told = await found.json().catch(() => ({}));
    throw new Error(told.error || `The server answered ${found.status}.`);
  }
  const problem = (text) => { at("problem").textContent = text || ""; at("problem").hidden = !text; };

  const NAMES = {
    raw: "attention itself (raw)", values: "attention times values", gradient: "gradient of the answer",
    rollout: "rollout through all layers", relevance: "relevance through all layers", search: "search for the best masked input",
  };

  // what to ask

  const about = (name) => state.models.find((one) => one.name === name) || { maps: {} };
  function show(picture) {
    state.picture = picture;
    at("stage").hidden = at("clear").hidden = !picture;
    at("boxes").value = "";
    draw();
    if (picture) { at("preview").src = picture; at("preview").alt = "The picture to ask about"; } else at("preview").removeAttribute("src");
    reset();
  }
  function reset() { state.without = []; state.unsaid = []; state.truth = null; state.before.clear(); told(); }

  // boxes: written in the field, or drawn over the picture, which writes them there

  function boxes() {
    const found = at("boxes").value.split(/[;\n]/).filter((one) => one.trim()).map((one) => one.trim().split(/[\s,]+/).map((part) => Number(part) / 100));
    if (found.some((one) => one.length !== 4 || one.some((side) => !(side >= 0 && side <= 1)) || one[0] >= one[2] || one[1] >= one[3])) {
      throw new Error("A box is four numbers from 0 to 100: left, top, right and bottom, as in “10 20 50 60; 55 10 90 40”.");
    }
    return found;
  }
  function draw(more) {
    at("drawn").replaceChildren();
    let found = [];
    try { found = boxes(); } catch { /* said when it is asked */ }
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
    if (state.without.length) parts.push(`${state.without.length} part${state.without.length > 1 ? "s" : ""} of the picture`);
    if (state.unsaid.length) parts.push(`${state.unsaid.length} word${state.unsaid.length > 1 ? "s" : ""}`);
    at("removed").textContent = parts.length ? `Removed: ${parts.join(" and ")}.` : "Turn it on, then click a part of a picture or a word.";
    at("restore").disabled = !parts.length;
  }
  function take(file) {
    if (!file) return;
    if (!["image/jpeg", "image/png", "image/webp"].includes(file.type)) return problem("That is not a JPEG, PNG or WEBP picture.");
    if (file.size > 8 * 2 ** 20) return problem("That picture is larger than 8 MiB; make it smaller.");
    const reader = new FileReader();
    reader.onload = () => { problem(""); show(reader.result); };  // nothing is sent before it is asked
    reader.onerror = () => problem("That file cannot be read.");
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
    at("map").value = known.maps[before] ? before : "raw";
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
        button.append(one.text || "");
        button.addEventListener("click", () => {
          show(one.picture); at("text").value = one.text || ""; state.truth = one.truth; at("ask").requestSubmit();
        });
      }
    } catch (error) { problem(error.message); }
  }
  const explain = () => { at("map-about").textContent = about(at("model").value).maps[at("map").value] || ""; };
  at("map").addEventListener("change", explain);
  at("model").addEventListener("change", chosen);

  function question(model) {
    const known = about(model), value = (id) => at(id).value.trim() || null;
    const asked = { model, map: known.maps[at("map").value] ? at("map").value : "raw", without: state.without, unsaid: state.unsaid };
    if (known.looks !== false && state.picture) asked.picture = state.picture;
    if (known.reads !== false && at("text").value.trim()) asked.text = at("text").value;
    if (known.boxed) asked.boxes = boxes();
    asked.layer = value("layer"); asked.query = value("query");
    asked.head = value("head") === null ? null : Number(value("head"));
    return asked;
  }

  // the answers

  at("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  async function ask() {
    const number = ++state.asked;
    const names = [...new Set([at("model").value, at("other").value].filter(Boolean))];
    problem("");
    at("go").disabled = true;
    at("busy").textContent = "Looking ...";
    try {
      const asked = names.map(question);
      const found = await Promise.all(asked.map(async (one) => (await call("/api/ask", one)).json()));
      if (number !== state.asked) return;
      at("columns").replaceChildren();
      at("start").hidden = true;
      at("tools").hidden = false;
      found.forEach((one, n) => reply(one, asked[n]));
      told();
      at("busy").textContent = `Answered in ${Math.max(...found.map((one) => one.seconds)).toFixed(2)} s.`;
    } catch (error) {
      if (number !== state.asked) return;
      problem(error.message);
      at("busy").textContent = "";
    } finally { if (number === state.asked) at("go").disabled = false; }
  }

  function reply(found, asked) {
    const box = make("section", "reply", at("columns"));
    box.setAttribute("aria-label", `Answer of ${found.model}`);
    make("h2", "", box, found.model);
    const whole = !asked.without.length && !asked.unsaid.length;
    if (whole) state.before.set(found.model, new Map(found.answers.map((one) => [one.name, one.chance])));
    const before = whole ? null : state.before.get(found.model);
    const first = found.answers[0], known = about(found.model);
    if (first) {
      const said = make("p", "said", box, known.writes || first.chance === null ? "It writes " : "It answers ");
      make("b", "", said, first.name);
      if (state.truth && !known.writes) make("span", first.name === state.truth ? "right" : "wrong", said, first.name === state.truth ? " ✓ right" : ` ✗ the right answer is ${state.truth}`);
      const was = before && [...before.keys()][0];
      if (was && was !== first.name) make("p", "was", box, `Before anything was removed it was “${was}”.`);
    }
    const list = make("ol", "chances", box);
    for (const one of found.answers) {
      const line = make("li", "", list);
      make("span", "", line, one.name);
      const right = make("span", "", line, one.chance === null ? "" : `${(100 * one.chance).toFixed(1)} %`);
      if (one.chance !== null) line.style.setProperty("--chance", `${100 * one.chance}%`);
      const was = before && before.get(one.name);
      if (was !== null && was !== undefined && one.chance !== null) {
        const change = 100 * (one.chance - was);
        make("span", `change ${change < -0.05 ? "down" : change > 0.05 ? "up" : ""}`, right, ` (${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(1)})`);
      }
    }
    for (const note of found.notes) if (!/^It (answers|writes)/.test(note)) make("p", "small", box, note);
    const actions = make("div", "actions", box);
    const copy = make("button", "", actions, "Copy as Python"), save = make("button", "", actions, "Download picture");
    copy.type = save.type = "button";
    const lines = make("div", "", box), code = make("pre", "", lines);
    make("code", "", code, found.code);
    lines.hidden = true;
    if (asked.picture) { // what the code reads
      const link = make("a", "small", lines, "Save photo.png, which these lines read");
      link.href = asked.picture; link.download = "photo.png";
    }
    copy.addEventListener("click", async () => {
      lines.hidden = false;
      try { await navigator.clipboard.writeText(found.code); copy.textContent = "Copied"; } catch { copy.textContent = "Here it is"; }
    });
    save.disabled = !found.view.panels.length;
    save.addEventListener("click", async () => {
      try {
        const address = URL.createObjectURL(await (await call("/api/picture", asked)).blob());
        const link = make("a", "", document.body); link.href = address; link.download = "attention.png"; link.click(); link.remove();
        setTimeout(() => URL.revokeObjectURL(address), 10000);
      } catch (error) { problem(error.message); }
    });
    drawPanels(found.view, box, { touch, removing: () => at("removing").checked });
    if (!found.view.panels.length) make("p", "empty", box, "This model attends to nothing, so it has no map of this kind. Try the method “gradient”.");
  }

  function touch({ box, range }) {
    const same = (a, b) => a.every((value, n) => Math.abs(value - b[n]) < 1e-6);
    const toggle = (list, one) => (list.some((other) => same(other, one)) ? list.filter((other) => !same(other, one)) : [...list, one]);
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
      for (const one of state.models) for (const id of ["model", "other"]) make("option", "", at(id), one.name).value = one.name;
      at("model").value = state.models[0].name;
      await chosen();
      const first = at("shelf").querySelector("button");
      if (first && !state.picture && !at("text").value) first.click(); // nobody has to begin before an empty page
    } catch (error) { problem(error.message); }
  })();
})();
