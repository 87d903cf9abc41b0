(function () {
  "use strict";
  // Sort a table by a column, the best first; cells without a value stay last.
  for (const button of document.querySelectorAll(".ranked .sort")) {
    button.addEventListener("click", () => {
      const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
      const column = head.cellIndex;
      const key = (row) => row.cells[column].dataset.sort || "";
      const rows = Array.from(body.rows);
      rows.sort((a, b) => {
        const one = key(a), other = key(b);
        if (!one || !other) return (one ? 0 : 1) - (other ? 0 : 1);
        const difference = Number(one) - Number(other);
        return Number.isNaN(difference) ? one.localeCompare(other) : difference;
      });
      body.append(...rows);
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", "ascending");
    });
  }

  // Show the table of one metric; without this script all are shown.
  const choose = document.getElementById("choose"), select = document.getElementById("metric");
  if (!choose) return;
  const parts = Array.from(document.querySelectorAll(".by-metric"));
  const show = () => parts.forEach((part, at) => { part.hidden = at !== Number(select.value); });
  select.addEventListener("change", show);
  for (const name of document.querySelectorAll(".metric-name")) name.hidden = true;
  choose.hidden = false;
  show();
})();
