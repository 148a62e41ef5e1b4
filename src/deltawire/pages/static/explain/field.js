// A field of weights as cells on a canvas: one square each, row by row, as many columns as rows.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The colours of the page, by name; asked for again at each drawing, as the theme may change. */
export const colours = () =>
  Object.fromEntries(
    [
      "ground",
      "raised",
      "line",
      "text",
      "soft",
      "accent",
      "accent-ground",
      "good",
      "bad",
      "warn",
      "anchor",
      "skip",
    ].map((name) => [name, colour(`--${name}`)]),
  );

export const darkMode = matchMedia("(prefers-color-scheme: dark)");

/** Paint all cells. `fill(i)` gives the colour of cell i, or null; `mark` is a cell with a frame, or null. */
export function paint(canvas, columns, size, fill, mark = null) {
  const scale = Math.max(1, Math.round(devicePixelRatio || 1));
  const edge = (i) => Math.round((i * size) / columns);
  const gap = size / columns > 3 ? 1 : 0;
  canvas.width = canvas.height = size * scale;
  canvas.style.width = canvas.style.height = `${size}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  for (let i = 0; i < columns * columns; i++) {
    const paintWith = fill(i);
    if (!paintWith) continue;
    context.fillStyle = paintWith;
    const [column, row] = [i % columns, Math.floor(i / columns)];
    context.fillRect(edge(column), edge(row), edge(column + 1) - edge(column) - gap, edge(row + 1) - edge(row) - gap);
  }
  if (mark !== null) {
    context.strokeStyle = colours().text;
    context.lineWidth = 2;
    const cell = size / columns;
    context.strokeRect(edge(mark % columns) - 1.5, edge(Math.floor(mark / columns)) - 1.5, cell + 2, cell + 2);
  }
}

/** The cell under a pointer. */
export function cellAt(canvas, columns, event) {
  const box = canvas.getBoundingClientRect();
  const cell = box.width / columns;
  const column = Math.floor((event.clientX - box.left) / cell);
  const row = Math.floor((event.clientY - box.top) / cell);
  return Math.min(Math.max(row, 0), columns - 1) * columns + Math.min(Math.max(column, 0), columns - 1);
}
