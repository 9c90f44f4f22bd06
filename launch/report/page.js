// Shows the nearest point of a figure beside the pointer. Figures are whole without it.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  };

  for (const svg of document.querySelectorAll("svg[data-xs]")) {
    const xs = svg.dataset.xs.split(" ").map(Number);
    const texts = svg.dataset.tips.split("\x1f");
    const [width, height] = svg.getAttribute("viewBox").split(" ").slice(2).map(Number);
    const cross = document.createElementNS(SVG, "line");
    cross.setAttribute("class", "cross");
    cross.setAttribute("y1", "10");
    cross.setAttribute("y2", String(height - 38));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const index = nearest(xs, (event.clientX - box.left) / box.width * width);
      cross.setAttribute("x1", xs[index]);
      cross.setAttribute("x2", xs[index]);
      svg.append(cross);
      tip.textContent = texts[index];
      tip.style.display = "block";
      const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
      const top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
      tip.style.left = `${Math.max(left, 8)}px`;
      tip.style.top = `${Math.max(top, 8)}px`;
    });
    svg.addEventListener("pointerleave", () => {
      cross.remove();
      tip.style.display = "none";
    });
  }
})();
