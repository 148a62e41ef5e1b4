// Elements in a line each, and numbers for people.

const SVG = "http://www.w3.org/2000/svg";

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);

let lastId = 0;
export const newId = () => `explain-${++lastId}`;

/** A picture, with what it shows in words. */
export function picture(width, height, label, ...children) {
  return s("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height }, ...children);
}

/** A choice from a list, with its label; `options` are pairs of value and text. */
export function choice(label, options, value, onchange) {
  const id = newId();
  const select = h(
    "select",
    { id, onchange: () => onchange(select.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
  );
  return h("div", { class: "control" }, h("label", { for: id }, label), select);
}

/** A slider over a list of values. */
export function slider(label, values, value, text, oninput) {
  const id = newId();
  const output = h("output", { for: id });
  const range = h("input", { id, type: "range", min: 0, max: values.length - 1, step: 1 });
  const control = h("div", { class: "control" }, h("label", { for: id }, label), output, range);
  control.set = (wanted) => {
    range.value = values.indexOf(wanted);
    output.textContent = text(wanted);
    range.setAttribute("aria-valuetext", text(wanted));
  };
  range.addEventListener("input", () => {
    const now = values[range.value];
    control.set(now);
    oninput(now);
  });
  control.set(value);
  return control;
}

export function tick(label, checked, onchange) {
  const box = h("input", { type: "checkbox", checked, onchange: () => onchange(box.checked) });
  return h("label", { class: "control tick" }, box, " ", label);
}

export function table(caption, head, rows) {
  return h(
    "table",
    null,
    h("caption", null, caption),
    h(
      "thead",
      null,
      h(
        "tr",
        null,
        head.map((text) => (text ? h("th", { scope: "col" }, text) : h("td"))),
      ),
    ),
    h(
      "tbody",
      null,
      rows.map(([first, ...rest]) =>
        h(
          "tr",
          null,
          h("th", { scope: "row" }, first),
          rest.map((cell) => h("td", null, cell)),
        ),
      ),
    ),
  );
}

/** Draws again whenever the width changes. */
export function onWidth(element, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(element.clientWidth);
    if (width && width !== last) draw((last = width));
  }).observe(element);
}

const inUnits = (value, base, units, digits = 3) => {
  let i = 0;
  while (i < units.length - 1 && Math.abs(value) >= base * 0.9995) {
    value /= base;
    i++;
  }
  return `${trim(value, digits)} ${units[i]}`;
};

/** Some significant digits, and no exponent. */
export function trim(value, digits = 3) {
  if (value === 0) return "0";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return Number(value.toPrecision(digits))
    .toFixed(Math.min(places, 12))
    .replace(/(\.\d*?)0+$/, "$1")
    .replace(/\.$/, "");
}

export const bytesText = (value) => inUnits(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const weightsText = (value) => inUnits(value / 1e6, 1000, ["M", "B", "T"]);
export const percentText = (share) => `${trim(100 * share)} %`;
export const countText = (value) => value.toLocaleString("en-US");
export const scientific = (value) => value.toExponential().replace("+", "");

/** A power of two, as one writes it. */
export const powerText = (exponent) =>
  `2${[...String(exponent)].map((letter) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(letter)]).join("")}`;

export function secondsText(value) {
  if (value === 0) return "0 s";
  if (value < 0) return `−${secondsText(-value)}`;
  if (value < 0.9995e-3) return `${trim(value * 1e6)} µs`;
  if (value < 0.9995) return `${trim(value * 1e3)} ms`;
  if (value < 120) return `${trim(value)} s`;
  return value < 7200 ? `${trim(value / 60)} min` : `${trim(value / 3600)} h`;
}
