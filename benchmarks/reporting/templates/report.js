for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], [m, n] = [parseFloat(x), parseFloat(y)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(m) || isNaN(n) ? x.localeCompare(y) : m - n;
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows);
  }));
}
