// Lines and dots on a canvas. Where there are more points than pixels, each column keeps its lowest and its highest.

const LEFT = 64, RIGHT = 10, TOP = 12, BOTTOM = 22;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Prepares a canvas for the size that it has now; `draw` is called with its context and size in CSS pixels.
export function onCanvas(canvas, draw) {
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `12px ${colour("--sans")}`;
  draw(context, width, height);
}

export function redrawing(canvas, draw) {
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

// Ticks at round numbers, about so many.
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 1);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

// [x, y] pairs in order of x, thinned to the lowest and highest of each pixel column.
export function thinned(points, pixelOf, width) {
  if (points.length <= 2 * width) return points;
  const kept = [];
  let column = null, low = null, high = null;
  const flush = () => {
    if (low === null) return;
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  };
  for (const point of points) {
    const at = Math.round(pixelOf(point[0]));
    if (at !== column) {
      flush();
      column = at;
      low = high = point;
    } else {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
  }
  flush();
  return kept;
}

export class Chart {
  constructor(canvas, { onPoint = null, onPick = null } = {}) {
    this.canvas = canvas;
    this.data = { series: [], marks: [], format: String, fromZero: true };
    this.at = null;
    this.drawn = 0;
    redrawing(canvas, () => this.draw());
    canvas.addEventListener("pointermove", (event) => onPoint?.(this.under(event)));
    canvas.addEventListener("pointerleave", () => onPoint?.(null));
    canvas.addEventListener("click", (event) => onPick?.(this.under(event)));
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.valueAt ? this.valueAt(event.clientX - box.left) : null;
  }

  set(data) {
    Object.assign(this.data, data);
    this.draw();
  }

  point(x) {
    this.at = x;
    this.draw();
  }

  draw() {
    onCanvas(this.canvas, (context, width, height) => this.paint(context, width, height));
  }

  paint(context, width, height) {
    const { series, marks, format, fromZero } = this.data;
    const xs = series.flatMap((each) => (each.points.length ? [each.points[0][0], each.points.at(-1)[0]] : []));
    for (const mark of marks) xs.push(mark.x);
    if (!xs.length) return;
    const first = Math.min(...xs), last = Math.max(...xs, first + 1);
    let low = fromZero ? 0 : Infinity, high = -Infinity;
    for (const { points } of series) {
      for (const [, y] of points) {
        if (y < low) low = y;
        if (y > high) high = y;
      }
    }
    if (high === -Infinity) [low, high] = [0, 1];
    if (high === low) high = low + (Math.abs(low) || 1);
    high += 0.06 * (high - low);
    if (!fromZero) low -= 0.06 * (high - low);
    const x = (value) => LEFT + ((value - first) / (last - first)) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - BOTTOM - TOP);
    this.valueAt = (pixel) => first + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (last - first);

    context.lineWidth = 1;
    context.fillStyle = colour("--soft");
    context.strokeStyle = colour("--line");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of ticks(low, high, height / 45)) {
      const at = Math.round(y(tick)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillText(format(tick).replace(/\.0+ /, " "), LEFT - 8, at);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    for (const tick of ticks(first, last, width / 110)) {
      if (Number.isInteger(tick)) context.fillText(String(tick), x(tick), height - 6);
    }
    this.drawn = 0;
    for (const each of series) this.line(context, each, x, y, width);
    for (const mark of marks) {
      context.fillStyle = colour("--anchor");
      context.fillRect(x(mark.x) - 3, TOP - 8, 6, 6);
    }
    if (this.at !== null && this.at >= first && this.at <= last) {
      context.strokeStyle = colour("--soft");
      context.beginPath();
      context.moveTo(Math.round(x(this.at)) + 0.5, TOP);
      context.lineTo(Math.round(x(this.at)) + 0.5, height - BOTTOM);
      context.stroke();
    }
  }

  line(context, { points, name, dots }, x, y, width) {
    const shown = thinned(points, x, width - LEFT - RIGHT);
    this.drawn += shown.length;
    context.strokeStyle = context.fillStyle = colour(name);
    if (dots || shown.length === 1) {
      context.globalAlpha = dots ? 0.55 : 1;
      for (const [a, b] of shown) context.fillRect(x(a) - 1.5, y(b) - 1.5, 3, 3);
      context.globalAlpha = 1;
      return;
    }
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    shown.forEach(([a, b], i) => (i ? context.lineTo(x(a), y(b)) : context.moveTo(x(a), y(b))));
    context.stroke();
    context.lineWidth = 1;
  }
}
