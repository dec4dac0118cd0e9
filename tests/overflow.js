// Appended to a page by the test of its layout: writes what overflows, is cut off or lies on other text into its title.
(() => {
  const found = [];
  const say = (what, element) => {
    const text = (element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 60);
    found.push(`${what}: ${element.tagName.toLowerCase()} ${text}`);
  };
  for (const each of document.querySelectorAll("details")) each.open = true;
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width + 1) found.push("the page scrolls sideways");
  for (const element of document.body.querySelectorAll("*")) {
    if (element.closest("svg") && element.tagName !== "svg") continue;
    if (element.closest("script")) continue;
    const scrolls = element.closest(".scroll");
    const box = element.getBoundingClientRect();
    if (!scrolls && box.width > 0 && (box.right > width + 1 || box.left < -1)) say("off the page", element);
    const hides = getComputedStyle(element).overflowX !== "visible";
    if (!element.classList.contains("scroll") && element.tagName !== "svg") {
      if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0 && (hides || !scrolls))
        say("wider than its box", element);
    }
  }
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map(text => [text, text.getBoundingClientRect()]);
    for (const [text, box] of boxes) {
      const out = box.left < frame.left - 1 || box.right > frame.right + 1;
      if (out || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) say("cut off", text);
    }
    boxes.forEach(([text, a], index) => {
      for (const [other, b] of boxes.slice(index + 1)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        // Boxes of lines hold the space between them, too: a third of a line is no overlap of letters.
        if (across > 1 && down > Math.min(a.height, b.height) / 3)
          say(`on "${other.textContent.trim().slice(0, 40)}"`, text);
      }
    });
  }
  document.title = JSON.stringify({ width, found });
})();
