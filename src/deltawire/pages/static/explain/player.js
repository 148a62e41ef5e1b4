// Play, pause and steps for a figure: buttons, a position to drag, and keys while the figure has the focus.
//
// A position runs from 0 to 1. `stops` are those that the keys go to. Where the system asks for less motion nothing
// moves by itself: playing is off, steps remain.

import { h, newId } from "explain/dom";

const still = matchMedia("(prefers-reduced-motion: reduce)");
const FINE = 1000;
const CLOSE = 1e-6;
const OWN_KEYS = "input, select, textarea";
const OWN_SPACE = "input, select, textarea, button, summary, a";

export class Player {
  /** `draw(position, playing)` shows a position; `stops()` lists the positions of the steps, ascending. */
  constructor(section, { seconds, stops, draw, start = 0 }) {
    Object.assign(this, { section, seconds, stops, drawAt: draw, position: start, playing: false });
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
    this.note = h("span", { class: "soft still" }, "Your system asks for less motion, so use the steps.");
    section
      .querySelector("[data-player]")
      .append(
        this.playButton,
        h("button", { type: "button", "aria-label": "Step back", onclick: () => this.step(-1) }, "◀ Step"),
        h("button", { type: "button", "aria-label": "Step forward", onclick: () => this.step(1) }, "Step ▶"),
        h("label", { for: id, class: "hidden-text" }, "Position"),
        this.scrub,
        this.note,
      );
    section.addEventListener("keydown", (event) => this.key(event));
    still.addEventListener("change", () => {
      this.pause();
      this.show();
    });
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

  play() {
    if (still.matches) return;
    if (this.position >= 1 - CLOSE) this.position = 0;
    this.playing = true;
    let last = null;
    const move = (now) => {
      if (!this.playing) return;
      this.position = Math.min(1, this.position + (last === null ? 0 : (now - last) / 1000 / this.seconds));
      last = now;
      if (this.position >= 1) this.playing = false;
      this.show();
      if (this.playing) requestAnimationFrame(move);
    };
    this.show();
    requestAnimationFrame(move);
  }

  pause() {
    this.playing = false;
    this.show();
  }

  step(direction) {
    const stops = this.stops();
    const next =
      direction > 0
        ? stops.find((stop) => stop > this.position + CLOSE)
        : stops.findLast((stop) => stop < this.position - CLOSE);
    this.go(next ?? (direction > 0 ? 1 : 0));
  }

  go(position) {
    this.playing = false;
    this.position = position;
    this.show();
  }

  show() {
    const { section, position, playing } = this;
    // A reader of screens hears where it stops, not every frame on the way.
    this.status.setAttribute("aria-live", playing ? "off" : "polite");
    section.dataset.position = position.toFixed(4);
    section.dataset.playing = playing;
    this.playButton.textContent = playing ? "Pause" : "Play";
    this.playButton.disabled = still.matches;
    this.note.hidden = !still.matches;
    this.scrub.value = Math.round(position * FINE);
    this.drawAt(position, playing);
  }
}
