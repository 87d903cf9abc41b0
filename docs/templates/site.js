// Search, theme, copying code, the menu of a phone. Nothing is asked of any server.
(function () {
  "use strict";
  const root = document.documentElement, base = document.body.dataset.root;

  const theme = document.getElementById("site-theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("overt-theme", root.dataset.theme); } catch (error) { /* a file without storage */ }
    label();
  });
  label();
  theme.hidden = false;

  const menu = document.querySelector(".menu");
  if (matchMedia("(max-width: 50rem)").matches) menu.open = false;
  const here = menu.querySelector("[aria-current]");
  if (here && menu.open) menu.scrollTop = Math.max(0, here.offsetTop - menu.clientHeight / 2);

  // The versions of the site, if a server has it. A page that another version lacks leads to its start.
  const shown = document.getElementById("site-version"), pick = document.getElementById("site-versions");
  async function offer() {
    const up = new URL(base + "../", location.href), answer = await fetch(new URL("versions.json", up));
    if (!answer.ok) return;
    const here = location.pathname.slice(up.pathname.length).split("/")[0];
    for (const { version, latest } of await answer.json()) {
      if (latest) pick.append(new Option(`latest (${version})`, "latest", false, here === "latest"));
      pick.append(new Option(version, version, false, here === version));
    }
    if (!pick.value) return;
    shown.hidden = true; pick.hidden = false;
    pick.addEventListener("change", async () => {
      const start = new URL(`${pick.value}/`, up), same = new URL(document.body.dataset.place, start);
      const there = await fetch(same, { method: "HEAD" }).then((found) => found.ok, () => false);
      location.href = there ? same.href + location.hash : new URL("index.html", start).href;
    });
  }
  if (shown && location.protocol.startsWith("http")) offer().catch(() => { /* a copy of one version */ });

  for (const block of document.querySelectorAll("main pre")) {
    const code = block.querySelector("code");
    if (!code || block.classList.contains("printed") || !navigator.clipboard) continue;
    const button = document.createElement("button");
    button.type = "button"; button.className = "copy"; button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; } catch (error) { button.textContent = "Not allowed"; }
    });
    block.append(button);
  }

  const field = document.getElementById("site-find"), found = document.getElementById("site-found");
  let chosen = -1;
  const plain = (text) => text.toLowerCase().replace(/heat[ -]maps?/g, "heatmap").replace(/grad[-_ ]cam/g, "gradcam");
  const stem = (word) => (word.length > 4 ? word.replace(/s$/, "") : word);
  const begins = (text, word) => { // at the start of a word: "kl", not "weakly"
    for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + 1)) if (!at || !/[a-z0-9]/.test(text[at - 1])) return true;
    return false;
  };
  const ENTRIES = SEARCH.map((entry) => ({ entry, fields: entry.map(plain) }));
  // Pages that explain come first, then names of the reference, then logs and lists.
  function kind(address, title) {
    if (address.startsWith("api/")) return /^[A-Z0-9_]+$/.test(title) || address.startsWith("api/overt.testing") ? -15 : 0;
    if (/^(LOG|CHANGELOG|results\/|docs\/(design|index|checked|parity|limits|speed|scale))|(LOG|RESULTS)\.html/.test(address)) return 4;
    return address.startsWith("docs/faq") ? 14 : address.startsWith("docs/") ? 22 : address.startsWith("index.") ? 22 : 12;
  }
  function score({ entry, fields: [title, heading, address, text] }, words, query) {
    let total = 0;
    for (const word of words) { // every word must occur; a title counts more than a heading, a heading more than text
      if (title.split(/[\W_]+/).includes(word)) total += 16;
      else if (heading.split(/[\W_]+/).includes(word)) total += 14;
      else if (begins(title, word)) total += 11;
      else if (begins(heading, word)) total += 10;
      else if (begins(text, word)) total += 4;
      else if (word.length > 3 && title.includes(word)) total += 3;
      else return 0;
    }
    const name = title.replaceAll("_", " ");
    if (name === query || heading === query) total += kind(entry[2], entry[0]) < 12 ? 8 : 20;
    if (entry[0] === field.value.trim() && /_|[a-z][A-Z]/.test(entry[0])) total += 30; // a name of the reference
    if (!heading) total += 5; // the page itself
    if (words.length > 1 && (text.includes(query) || heading.includes(query) || title.includes(query))) total += 6;
    return total + kind(entry[2], entry[0]) - Math.min(2, title.length / 60);
  }
  const marked = (text, words) => { // as written: a heat map is found as "heatmap" too
    const made = document.createDocumentFragment();
    const pattern = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
    text.split(new RegExp(`(${pattern})`, "i")).forEach((part, at) => {
      if (at % 2) { const mark = document.createElement("mark"); mark.textContent = part; made.append(mark); } else made.append(part);
    });
    return made;
  };
  function around(text, words) { // the part of a text where the first word stands
    const at = Math.max(0, ...words.map((word) => plain(text).indexOf(word)).filter((n) => n >= 0).slice(0, 1));
    return (at > 50 ? "… " : "") + text.slice(Math.max(0, at - 40), at + 120);
  }
  function search() {
    const query = plain(field.value).trim(), words = query.split(/\s+/).filter(Boolean).map(stem);
    found.replaceChildren();
    chosen = -1;
    const best = words.length ? ENTRIES.map((one) => [score(one, words, query), one.entry]).filter(([n]) => n !== 0).sort((a, b) => b[0] - a[0]).slice(0, 14) : [];
    for (const [, [title, heading, address, text]] of best) {
      const line = document.createElement("li");
      line.setAttribute("role", "option");
      const link = document.createElement("a");
      link.href = base + address;
      const name = document.createElement("b");
      name.append(marked(title, words));
      link.append(name);
      if (heading) { const more = document.createElement("span"); more.append(" · ", marked(heading, words)); link.append(more); }
      const words_ = document.createElement("p");
      words_.append(marked(around(text, words), words));
      link.append(words_);
      line.append(link);
      found.append(line);
    }
    if (words.length && !best.length) found.append(Object.assign(document.createElement("li"), { textContent: "No page contains all of these words." }));
    found.hidden = !words.length;
    field.setAttribute("aria-expanded", String(!found.hidden));
  }
  field.addEventListener("input", search);
  field.addEventListener("focus", search);
  field.addEventListener("keydown", (event) => {
    const lines = [...found.querySelectorAll("a")];
    if (event.key === "Escape") { field.value = ""; search(); field.blur(); }
    if (event.key === "Enter" && lines.length) lines[Math.max(0, chosen)].click();
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    chosen = Math.min(lines.length - 1, Math.max(0, chosen + (event.key === "ArrowDown" ? 1 : -1)));
    lines.forEach((line, at) => line.parentNode.setAttribute("aria-selected", String(at === chosen)));
    if (lines[chosen]) lines[chosen].scrollIntoView({ block: "nearest" });
  });
  document.addEventListener("click", (event) => { if (!event.target.closest(".find")) found.hidden = true; });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); field.focus(); }
  });
})();
