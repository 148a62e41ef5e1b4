// Play, pause and steps for a scene: buttons, a position to drag, and keys while the scene has the focus.
//
// A position runs from 0 to 1; `stops` are those that the keys go to. A scene plays by itself when it is first seen.
// Where the system asks for less motion nothing moves: playing goes from stop to stop, and only when asked to.

import { h, newId } from "explain/dom";

const still = matchMedia("(prefers-reduced-motion: reduce)");
const FINE = 1000;
const CLOSE = 1e-6;
const REST_SECONDS = 1.2;
const OWN_KEYS = "input, select, textarea";
const OWN_SPACE = "input, select, textarea, button, summary, a";
const players = [];

export class Player {
  /** `draw(position, playing)` shows a position; `stops()` lists the positions of the steps, ascending. */
  constructor(section, { seconds, stops, draw }) {
    Object.assign(this, { section, seconds, stops, drawAt: draw, position: 1, playing: false });
    this.status = section.querySelector("[data-status]");
    this.playButton = h("button", { type: "button", class: "play", onclick: () => this.toggle() }, "Play");
    const id = newId();
    this.scrub = h("input", {
      id,
      type: "range",
      min: 0,
      max: FINE,
      step: 1,
      oninput: () => this.go(this.scrub.value / FINE),
    });
    section
      .querySelector("[data-player]")
      .append(
        this.playButton,
        h("button", { type: "button", "aria-label": "Step back", onclick: () => this.step(-1) }, "◀"),
        h("button", { type: "button", "aria-label": "Step forward", onclick: () => this.step(1) }, "▶"),
        h("label", { for: id, class: "hidden-text" }, "Position"),
        this.scrub,
      );
    section.addEventListener("keydown", (event) => this.key(event));
    still.addEventListener("change", () => this.pause());
    players.push(this);
  }

  /** Play once, by itself, when most of the picture is in view and the reader has not begun. */
  once(stage) {
    if (still.matches) return;
    this.position = 0;
    const watch = new IntersectionObserver(
      ([entry]) => {
        if (!entry.isIntersecting) return;
        watch.disconnect();
        if (this.position === 0 && !this.touched) this.play(true);
      },
      { threshold: 0.6 },
    );
    watch.observe(stage);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const wants = {
      " ": () => this.toggle(),
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      Home: () => this.go(0),
      End: () => this.go(1),
    }[event.key];
    const taken = event.key === " " ? OWN_SPACE : OWN_KEYS;
    if (!wants || event.target.closest(taken)) return;
    event.preventDefault();
    wants();
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play(alone = false) {
    this.touched ||= !alone;
    for (const other of players) if (other !== this && other.playing) other.pause();
    if (this.position >= 1 - CLOSE) this.position = 0;
    this.playing = true;
    this.show();
    if (still.matches) this.rest();
    else this.move();
  }

  move() {
    let last = null;
    const frame = (now) => {
      if (!this.playing) return;
      this.position = Math.min(1, this.position + (last === null ? 0 : (now - last) / 1000 / this.seconds));
      last = now;
      if (this.position >= 1) this.playing = false;
      this.show();
      if (this.playing) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  /** From stop to stop, each shown for a while. */
  rest() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (!this.playing) return;
      this.position = this.next(1);
      this.playing = this.position < 1 - CLOSE;
      this.show();
      if (this.playing) this.rest();
    }, 1000 * REST_SECONDS);
  }

  pause() {
    this.playing = false;
    this.show();
  }

  next(direction) {
    const stops = this.stops();
    return direction > 0
      ? (stops.find((stop) => stop > this.position + CLOSE) ?? 1)
      : (stops.findLast((stop) => stop < this.position - CLOSE) ?? 0);
  }

  step(direction) {
    this.go(this.next(direction));
  }

  go(position) {
    Object.assign(this, { touched: true, playing: false, position });
    this.show();
  }

  show() {
    const { section, position, playing } = this;
    // A reader of screens hears where it stops, not every frame on the way.
    this.status.setAttribute("aria-live", playing ? "off" : "polite");
    section.dataset.position = position.toFixed(4);
    section.dataset.playing = playing;
    if (position >= 1 || this.touched) section.dataset.invites = "";
    this.playButton.textContent = playing ? "Pause" : position >= 1 - CLOSE ? "Replay" : "Play";
    this.scrub.value = Math.round(position * FINE);
    this.drawAt(position, playing);
  }
}
