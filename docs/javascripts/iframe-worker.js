// Search in a site that is opened as a file. Browsers refuse web workers on file:// pages, so the script of a worker
// runs in a hidden frame instead. The theme's search needs `message` events and `postMessage`, nothing else.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.messages = [];

      // An empty frame has the page's origin: both sides reach each other directly.
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.ready = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
        this.messages.forEach(this.ready);
      };
      inside.document.body.append(script);
    }

    postMessage(data) {
      // Messages that come before the script has loaded wait for it.
      if (this.ready) this.ready(data);
      else this.messages.push(data);
    }

    terminate() {}
  };
}
