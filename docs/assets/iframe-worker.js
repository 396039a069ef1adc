/* The search of pages that are opened from a disk. Browsers allow no workers there, so the script of a worker runs in a
   hidden frame of the page. The theme asks for this file in place of one on another host. */
(function () {
  "use strict";
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title><body></body>";
      this.started = new Promise((resolve) => {
        this.frame.addEventListener("load", () => this.start(String(url)).then(resolve), { once: true });
      });
      document.body.append(this.frame);
    }

    /* Gives the frame what the global scope of a worker has, and runs the worker's script in it. */
    start(url) {
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.tell(data);
      scope.importScripts = async (...urls) => {
        for (const one of urls) await run(scope, one);
      };
      return run(scope, url);
    }

    tell(data) {
      const event = new MessageEvent("message", { data: structuredClone(data) });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      const copy = structuredClone(data);
      this.started.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: copy }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  function run(scope, url) {
    return new Promise((resolve, reject) => {
      const script = scope.document.createElement("script");
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => reject(new Error(`${url} cannot be loaded`)));
      script.src = new URL(url, location.href);
      scope.document.body.append(script);
    });
  }

  window.Worker = FrameWorker;
})();
