// Lines and dots on a canvas, over an axis that all charts share.

const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 20;

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

// Powers of ten, with 2 and 5 between them where there are few.
export function logTicks(low, high) {
  const few = Math.log10(high / low) < 2.5;
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of few ? [1, 2, 5] : [1]) found.push(digit * 10 ** power);
  }
  const inside = found.filter((each) => each >= low && each <= high);
  return inside.length > 6 ? inside.filter((_, i) => i % 2 === 0) : inside;
}

// The value of a line at x: that of the last point before it.
export function valueAt(points, x) {
  let low = 0, high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle + 1;
    else high = middle;
  }
  return low ? points[low - 1][1] : null;
}

// A line without axes.
export function sparkline(canvas, points, [first, last], name) {
  onCanvas(canvas, (context, width, height) => {
    const most = Math.max(...points.map((point) => point[1]), 1);
    const x = (value) => 1 + ((value - first) / Math.max(last - first, 1e-9)) * (width - 2);
    const y = (value) => height - 2 - (value / most) * (height - 4);
    stroke(context, points, x, y, { name, stairs: true });
  });
}

function stroke(context, points, x, y, { name, stairs = false, dash = false, bold = false }) {
  context.strokeStyle = colour(name);
  context.lineWidth = bold ? 2.5 : 1.5;
  context.lineJoin = "round";
  context.setLineDash(dash ? [5, 3] : []);
  context.beginPath();
  points.forEach(([a, b], i) => {
    if (!i) return context.moveTo(x(a), y(b));
    if (stairs) context.lineTo(x(a), y(points[i - 1][1]));
    context.lineTo(x(a), y(b));
  });
  context.stroke();
  context.setLineDash([]);
}

export class Chart {
  // `on` has: point(x or null), select(from, to), reset(), key(event).
  constructor(canvas, on) {
    this.canvas = canvas;
    this.data = { lines: [], range: [0, 1], format: String, formatX: String, fromZero: true, log: false };
    this.at = this.pressed = this.dragged = null;
    redrawing(canvas, () => this.draw());
    canvas.addEventListener("pointerdown", (event) => {
      this.pressed = this.under(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.pressed !== null) this.dragged = this.under(event);
      on.point(this.under(event));
    });
    canvas.addEventListener("pointerup", () => {
      const [from, to] = [this.pressed, this.dragged].sort((a, b) => a - b);
      const isWide = this.dragged !== null && this.pixelOf(to) - this.pixelOf(from) > 8;
      this.pressed = this.dragged = null;
      if (isWide) on.select(from, to);
    });
    canvas.addEventListener("pointercancel", () => { this.pressed = this.dragged = null; });
    canvas.addEventListener("pointerleave", () => on.point(null));
    canvas.addEventListener("dblclick", () => on.reset());
    canvas.addEventListener("keydown", (event) => on.key(event));
  }

  under(event) {
    const [first, last] = this.data.range;
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return first + Math.min(Math.max(share, 0), 1) * (last - first);
  }

  pixelOf(value) {
    const [first, last] = this.data.range;
    return LEFT + ((value - first) / Math.max(last - first, 1e-9)) * (this.canvas.clientWidth - LEFT - RIGHT);
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

  // The lowest and the highest value that are shown, and where a value lies between them, from 0 to 1.
  scale() {
    const { lines, fromZero, log, range: [first, last] } = this.data;
    let low = Infinity, high = -Infinity, hasZero = false;
    for (const { points } of lines) {
      for (const [x, y] of points) {
        if (x < first || x > last) continue;
        hasZero ||= y <= 0;
        if (y < low && (y > 0 || !log)) low = y;
        if (y > high) high = y;
      }
    }
    if (high === -Infinity || (log && high <= 0)) [low, high] = log ? [1, 10] : [0, 1];
    if (log) {
      // What is zero lies on the ground.
      [low, high] = [low / (hasZero || low === high ? 2 : 1.1), high * (low === high ? 2 : 1.1)];
      return [low, high, (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low)];
    }
    if (fromZero && low > 0) low = 0;
    if (high === low) high = low + (Math.abs(low) || 1);
    const room = 0.06 * (high - low);
    [low, high] = [fromZero && low === 0 ? 0 : low - room, high + room];
    return [low, high, (value) => (value - low) / (high - low)];
  }

  paint(context, width, height) {
    const { lines, format, formatX, log, range: [first, last] } = this.data;
    const [low, high, share] = this.scale();
    const x = (value) => this.pixelOf(value);
    const y = (value) => height - BOTTOM - share(value) * (height - BOTTOM - TOP);
    context.lineWidth = 1;
    context.fillStyle = colour("--soft");
    context.strokeStyle = colour("--line");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of log ? logTicks(low, high) : ticks(low, high, height / 40)) {
      const at = Math.round(y(tick)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillText(format(tick).replace(/\.0+ /, " "), LEFT - 6, at);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    for (const tick of ticks(first, last, width / 110)) {
      const text = formatX(tick, last - first);
      const half = context.measureText(text).width / 2;
      if (x(tick) - half >= 0 && x(tick) + half <= width) context.fillText(text, x(tick), height - 5);
    }
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, height - BOTTOM + 2);
    context.clip();
    for (const line of lines) this.line(context, line, x, y);
    if (this.pressed !== null && this.dragged !== null) {
      context.fillStyle = colour("--accent");
      context.globalAlpha = 0.18;
      context.fillRect(x(this.pressed), TOP, x(this.dragged) - x(this.pressed), height - BOTTOM - TOP);
      context.globalAlpha = 1;
    }
    if (this.at !== null && this.at >= first && this.at <= last) {
      context.fillStyle = colour("--soft");
      context.fillRect(Math.round(x(this.at)), TOP, 1, height - BOTTOM - TOP);
    }
    context.restore();
  }

  line(context, line, x, y) {
    const { points } = line;
    if (line.dots || points.length === 1) {
      context.fillStyle = colour(line.name);
      context.globalAlpha = points.length > 1 ? 0.5 : 1;
      for (const [a, b] of points) context.fillRect(x(a) - 1.5, y(b) - 1.5, 3, 3);
      context.globalAlpha = 1;
      return;
    }
    stroke(context, points, x, y, line);
  }
}
