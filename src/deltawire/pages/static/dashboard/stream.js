// Server-sent events. The browser connects again by itself and says which records it has; where it gives up, we do.

export function listen(handlers) {
  let source = null;

  function open() {
    source = new EventSource("/api/events");
    for (const name of ["reset", "state", "notes", "tick"]) {
      source.addEventListener(name, (event) => handlers[name](JSON.parse(event.data)));
    }
    source.onopen = () => handlers.connected(true);
    source.onerror = () => {
      handlers.connected(false);
      if (source.readyState === EventSource.CLOSED) setTimeout(open, 2000);
    };
  }

  open();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && open());
}
