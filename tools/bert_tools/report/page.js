"use strict";
// Shows under the pointer what each curve has there; a line marks the same place in all charts.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const charts = JSON.parse(document.getElementById("values").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const shown = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 5 });
  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const make = (name, classes, attributes) => {
    const made = document.createElementNS(SVG, name);
    made.setAttribute("class", classes);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const clear = () => {
    for (const each of document.querySelectorAll(".cursor, .at, .tip")) each.remove();
  };
  const place = (chart, x) => `${(100 * (x - chart.low)) / (chart.high - chart.low)}%`;

  const show = (plot, x) => {
    clear();
    const chart = charts[plot.dataset.chart];
    const near = chart.series.map((each) => nearest(each.x, x));
    const places = chart.series.map((each, number) => each.x[near[number]]).filter(Number.isFinite);
    const at = places.reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best));
    for (const other of plots) {
      const ends = charts[other.dataset.chart];
      if (ends.across !== chart.across || at < ends.low || at > ends.high) continue;
      const left = place(ends, at);
      other.append(make("line", "cursor", { x1: left, x2: left, y1: "0", y2: "100%" }));
    }
    tip(plot, chart, at, near);
  };

  const tip = (plot, chart, at, near) => {
    const box = document.createElement("div");
    box.className = "tip";
    const line = (label, value) => {
      const row = document.createElement("div");
      const words = document.createElement("span");
      const bold = document.createElement("b");
      words.textContent = label;
      bold.textContent = value;
      row.append(words, bold);
      box.append(row);
    };
    line(chart.across, whole.format(at));
    for (const [number, each] of chart.series.entries()) {
      if (!each.x.length) continue;
      const x = each.x[near[number]], y = each.y[near[number]];
      if (Math.abs(x - at) > (chart.high - chart.low) / 12) continue;
      const value = `${shown.format(y)}${chart.unit ? "\u00a0" + chart.unit : ""}`;
      line(each.label, x === at ? value : `${value} at ${whole.format(x)}`);
    }
    const card = plot.closest(".card");
    card.append(box);
    const outer = card.getBoundingClientRect(), inner = plot.getBoundingClientRect();
    const share = (at - chart.low) / (chart.high - chart.low);
    const middle = inner.left - outer.left + share * inner.width;
    const room = outer.width - box.offsetWidth - 8;
    const left = share > 0.5 ? middle - box.offsetWidth - 12 : middle + 12;
    box.style.left = `${Math.max(8, Math.min(room, left))}px`;
    box.style.top = `${inner.bottom - outer.top + 24}px`; // below the curves and the axis
  };

  for (const plot of plots) {
    const chart = charts[plot.dataset.chart];
    const all = [...new Set(chart.series.flatMap((each) => each.x))].sort((a, b) => a - b);
    let index = all.length - 1;
    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      const share = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
      show(plot, chart.low + share * (chart.high - chart.low));
    };
    if (!all.length) continue;
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", clear);
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      index = Math.max(0, Math.min(all.length - 1, index + step));
      show(plot, all[index]);
    });
  }
})();
