(function () {
  "use strict";
  const root = document.documentElement;
  const keep = { // a page opened from a file may not be allowed to remember
    get(name) { try { return localStorage.getItem(name); } catch (error) { return null; } },
    set(name, value) { try { localStorage.setItem(name, value); } catch (error) { /* no matter */ } },
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
    })),
  }));
  const chosen = (id) => { const field = document.getElementById(id); return field ? field.value : ""; };
  const known = (values) => values.filter((value) => value !== null);
  // "yes": every known value is true; "no": every one is false; "mixed": some of each.
  const verdict = (values) =>
    !values.length ? "" : values.every(Boolean) ? "yes" : values.some(Boolean) ? "mixed" : "no";
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  function apply() {
    const run = chosen("f-run"), answer = chosen("f-answer"), inside = chosen("f-inside");
    const group = chosen("f-group"), order = chosen("f-order");
    let shown = 0;
    for (const item of cards) {
      const views = item.views.filter((view) => !run || view.run === run);
      const right = verdict(known(views.map((view) => view.right)));
      const scores = known(views.map((view) => view.inside));
      const on = verdict(scores.map((score) => score >= 0.5));
      item.score = scores.length ? mean(scores) : null;
      const visible = views.length > 0
        && (!answer || right === { right: "yes", wrong: "no", mixed: "mixed" }[answer])
        && (!inside || on === { on: "yes", off: "no", mixed: "mixed" }[inside])
        && (!group || item.group === group);
      item.card.hidden = !visible;
      shown += visible;
    }
    const sorted = cards.slice().sort((a, b) => {
      if (!order || a.score === b.score) return a.number - b.number;
      if (a.score === null) return 1;
      if (b.score === null) return -1;
      return order === "up" ? a.score - b.score : b.score - a.score;
    });
    gallery.append(...sorted.map((item) => item.card));
    for (const layer of ["heat", "outline"]) {
      const box = document.getElementById(`f-${layer}`);
      gallery.classList.toggle(`no-${layer}`, box !== null && !box.checked);
    }
    document.getElementById("count").textContent = `${shown} of ${cards.length} shown`;
    document.getElementById("none").hidden = shown > 0;
  }

  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  apply();
})();
