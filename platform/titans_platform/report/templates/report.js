// Columns sort when their heading is pressed, and sources can be copied. Without scripts nothing is lost.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows].flatMap((row) => [...row.cells]);
  // where a heading stands over two columns, those below it sort
  const leaves = heads.filter((head) => head.colSpan === 1);
  const tops = leaves.filter((head) => head.parentNode.rowIndex === 0);
  const subs = leaves.filter((head) => head.parentNode.rowIndex > 0);
  const order = subs.length ? [tops[0], ...subs, ...tops.slice(1)] : tops;
  order.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const down = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        const text = cell?.dataset.value ?? cell?.textContent.trim() ?? "";
        return text === "" || isNaN(text) ? text : Number(text);
      };
      const body = table.tBodies[0];
      const compare = (a, b) =>
        typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      const empty = (row) => key(row) === "";
      const rows = [...body.rows].sort(
        (a, b) => empty(a) - empty(b) || (down ? 1 : -1) * compare(key(a), key(b)),
      );
      body.append(...rows);
    };
  });
}
for (const button of document.querySelectorAll(".copy")) {
  button.onclick = async () => {
    await navigator.clipboard.writeText(button.nextElementSibling.textContent);
    button.textContent = "Copied";
  };
}
