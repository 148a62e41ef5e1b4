// What the theme leaves to those who cannot see the page: its search is a dialog without a name, its navigations share names, tables that scroll
// cannot be reached by key, and a header cell without words is none. Some of this it makes only when the page is there.
function label() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-nav .md-nav[aria-labelledby]").forEach((nav, i) => {
    nav.setAttribute("aria-label", `${document.getElementById(nav.getAttribute("aria-labelledby"))?.innerText.trim()}, group ${i + 1}`);
    nav.removeAttribute("aria-labelledby");
  });
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.role = "none";
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  for (const cell of document.querySelectorAll("th:empty")) cell.replaceWith(document.createElement("td"));
}
label();
new MutationObserver(label).observe(document.body, { childList: true, subtree: true });

// The frame of the figures is as high as the page in it, so that there is one scroll bar and not two. And it takes the colours that were
// chosen here, where that is not what the system asks for.
const darkRules = new Set();

function paint(inside) {
  const dark = document.body.dataset.mdColorScheme === "slate";
  inside.documentElement.style.colorScheme = dark ? "dark" : "light";
  for (const sheet of inside.styleSheets) {
    for (const rule of sheet.cssRules) {
      if (rule.media?.mediaText.includes("prefers-color-scheme: dark")) darkRules.add(rule);
      if (darkRules.has(rule)) rule.media.mediaText = dark ? "all" : "not all";
    }
  }
}

for (const frame of document.querySelectorAll("iframe.figures")) {
  const settle = () => {
    const inside = frame.contentDocument;
    const fit = () => (frame.style.height = `${inside.body.scrollHeight + 2}px`);
    paint(inside);
    fit();
    new ResizeObserver(fit).observe(inside.body);
    new MutationObserver(() => paint(inside)).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  };
  frame.addEventListener("load", settle);
  if (frame.contentDocument?.readyState === "complete" && frame.contentDocument.URL !== "about:blank") settle();
}
