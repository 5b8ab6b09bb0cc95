"use strict";
// The page works without this: :target shows a cell. Added here: focus, arrow keys, Escape, logs that show their end,
// copy buttons.
(() => {
  const squares = [...document.querySelectorAll(".grid a")];

  const show = () => {
    const cell = document.querySelector(".cell:target");
    for (const square of squares) {
      if (cell && square.hash === `#${cell.id}`) square.setAttribute("aria-current", "true");
      else square.removeAttribute("aria-current");
    }
    if (!cell) return;
    cell.querySelector("h2").focus({ preventScroll: true });
    cell.querySelectorAll("details pre").forEach(toEnd);
  };

  const toEnd = (pre) => { if (!pre.matches(".stack")) pre.scrollTop = pre.scrollHeight; };
  document.addEventListener("toggle", (event) => event.target.querySelectorAll("pre").forEach(toEnd), true);

  const neighbour = (square, key) => {
    const here = square.closest("td");
    const row = here.parentElement;
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[key];
    const line = key === "ArrowLeft" || key === "ArrowRight"
      ? [...row.cells]
      : [...row.parentElement.rows].map((other) => other.cells[here.cellIndex]);
    for (let i = line.indexOf(here) + step; i >= 0 && i < line.length; i += step) {
      const link = line[i].querySelector("a");
      if (link) return link;
    }
    return null;
  };

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const cell = document.querySelector(".cell:target");
    if (event.key === "Escape" && cell) {
      const square = squares.find((link) => link.hash === `#${cell.id}`);
      location.hash = "grid";
      if (square) square.focus();
    }
    const square = event.target.closest?.(".grid a");
    const next = square && event.key.startsWith("Arrow") ? neighbour(square, event.key) : null;
    if (next) {
      event.preventDefault();
      next.focus();
    }
  });

  const copy = async (code) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(code.textContent);
    getSelection().selectAllChildren(code); // served without TLS: there is no clipboard object
    if (!document.execCommand("copy")) throw new Error("not allowed");
  };

  for (const command of document.querySelectorAll(".command")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", async () => {
      const code = command.querySelector("code");
      try {
        await copy(code);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    command.append(button);
  }

  addEventListener("hashchange", show);
  show();
})();
