"use strict";
(async function () {
  const MARKS = {
    resume: {line_color: "#8b5cf6", line_dash: "dashed", line_width: 2, line_alpha: 0.9},
    checkpoint: {line_color: "#8793a3", line_dash: "dotted", line_width: 1.5, line_alpha: 0.7},
    skipped: {line_color: "#d6336c", line_dash: "solid", line_width: 1, line_alpha: 0.7},
  };
  const DARK = {text: "#b6c0cd", line: "#59636f", grid: "#2a313b"};
  const LIGHT = {text: "#3d4757", line: "#9aa4b2", grid: "#e7ebf0"};
  const KEPT = "gptlm-report-x";  // the choice of the x axis survives a reload
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const isDark = window.matchMedia("(prefers-color-scheme: dark)");
  const isPaper = window.matchMedia("print");
  const isCoarse = window.matchMedia("(pointer: coarse)").matches;
  const plots = [], axes = [], grids = [], legends = [], sources = [], marks = [], readings = [];
  const range = data.panels.length ? new Bokeh.DataRange1d({range_padding: 0.02}) : null;

  function draw(panel) {
    const plot = new Bokeh.Plotting.Figure({
      height: 300, sizing_mode: "stretch_width", x_range: range, tools: [], toolbar_location: "above",
      background_fill_color: null, border_fill_color: null, outline_line_color: null,
      x_axis_label: "step", y_axis_label: panel.unit, min_border_right: 12,
    });
    const zoom = new Bokeh.BoxZoomTool({dimensions: "width"});
    plot.add_tools(zoom, new Bokeh.PanTool({dimensions: "width"}), new Bokeh.WheelZoomTool({dimensions: "width"}),
      new Bokeh.ResetTool(), new Bokeh.SaveTool());
    plot.toolbar.logo = null;
    plot.toolbar.autohide = true;
    plot.toolbar.active_drag = isCoarse ? null : zoom;  // a finger that moves over a chart scrolls the page
    plot.toolbar.active_scroll = null;
    const [x] = plot.below, [y] = plot.left;
    x.formatter = new Bokeh.NumeralTickFormatter({format: "0,0"});
    x.ticker = new Bokeh.BasicTicker({min_interval: 1});  // whole steps, of a short run too
    if (!panel.digits.includes("e")) y.formatter = new Bokeh.NumeralTickFormatter({format: "0.[000]a"});
    for (const part of plot.center) if (part instanceof Bokeh.Grid && part.dimension === 0) part.visible = false;
    for (const axis of [x, y]) axis.setv({axis_label_text_font_style: "normal", minor_tick_line_color: null});
    axes.push([x, y]);
    for (const mark of data.marks) drawMarks(plot, mark);
    const lines = panel.curves.map((curve) => drawCurve(plot, curve));
    const shown = panel.curves.map((curve, at) => ({...curve, digits: panel.digits, source: lines[at][0].data_source}));
    readings.push(shown);
    for (const event of isCoarse ? ["tap"] : ["mousemove"]) plot.on_event(event, (pointer) => read(pointer.x));
    plot.on_event("mouseleave", () => read(null));
    if (lines.length > 1) {
      const items = lines.map((drawn, at) =>
        new Bokeh.LegendItem({label: {value: panel.curves[at].name}, renderers: drawn}));
      const legend = new Bokeh.Legend({items, click_policy: "hide", ncols: data.runs > 1 ? 1 : 3, border_line_color: null,
        orientation: "horizontal", background_fill_color: null, label_text_font_size: "12px", margin: 0, padding: 2});
      plot.add_layout(legend, "below");
      legends.push(legend);
    }
    grids.push(...plot.center.filter((part) => part instanceof Bokeh.Grid));
    plots.push(plot);
  }
  function drawCurve(plot, curve) {
    const source = new Bokeh.ColumnDataSource({
      data: {x: curve.step, step: curve.step, tokens: curve.tokens.map((one) => one ?? NaN), y: curve.y.map((one) => one ?? NaN)},
    });
    const look = {source, name: curve.name, line_color: curve.colour};
    const drawn = [plot.line({field: "x"}, {field: "y"}, {...look, line_width: 1.7, line_dash: curve.dash})];
    if (curve.dots) {
      drawn.push(plot.scatter({field: "x"}, {field: "y"}, {...look, size: 5, fill_color: curve.colour}));
    }
    sources.push(source);
    return drawn;
  }
  function read(x) {  // below each chart, the values of its curves next to x
    document.querySelectorAll(".values").forEach((place, at) => {
      place.replaceChildren(...(x === null ? [] : readings[at].map((curve) => valueOf(curve, x))));
    });
  }
  function valueOf({name, colour, digits, source}, x) {
    const {x: all, y, step} = source.data;
    let near = 0;
    for (let at = 1; at < all.length; at++) if (Math.abs(all[at] - x) < Math.abs(all[near] - x)) near = at;
    const decimals = (digits.split(".")[1] ?? "").length;
    const value = digits.includes("e") ? y[near].toExponential(3)
      : y[near].toLocaleString("en", {minimumFractionDigits: decimals, maximumFractionDigits: decimals});
    const entry = document.createElement("span"), dot = document.createElement("i");
    dot.style.background = colour;
    entry.append(dot, `${name} ${value} (step ${step[near].toLocaleString("en")})`);
    return entry;
  }
  function drawMarks(plot, mark) {
    const source = new Bokeh.ColumnDataSource({data: {x: mark.step, step: mark.step, tokens: mark.tokens, text: mark.text}});
    const spans = plot.vspan({field: "x"}, {source, level: "underlay", ...MARKS[mark.kind]});
    spans.tags = [mark.kind];
    plot.add_tools(new Bokeh.HoverTool({renderers: [spans], tooltips: "@text", visible: false}));
    sources.push(source);
    marks.push(spans);
  }
  function paint() {
    const {text, line, grid} = isDark.matches && !isPaper.matches ? DARK : LIGHT;
    for (const axis of axes.flat()) {
      axis.setv({axis_label_text_color: text, major_label_text_color: text, axis_line_color: line,
        major_tick_line_color: line});
    }
    for (const one of grids) one.grid_line_color = grid;
    for (const legend of legends) legend.label_text_color = text;
  }
  function choose(axis) {
    for (const source of sources) source.data = {...source.data, x: source.data[axis]};
    for (const [x] of axes) {
      x.axis_label = axis === "step" ? "step" : "tokens";
      x.formatter = new Bokeh.NumeralTickFormatter({format: axis === "step" ? "0,0" : "0.[00]a"});
    }
    for (const plot of plots) plot.reset.emit();
  }

  data.panels.forEach(draw);
  if (plots.length) {
    paint();
    const made = new Bokeh.Document();
    for (const plot of plots) made.add_root(plot);
    await Bokeh.embed.add_document_standalone(made, document.body, [...document.querySelectorAll(".plot")]);
    for (const medium of [isDark, isPaper]) medium.addEventListener("change", paint);
    const form = document.getElementById("switches");
    form.addEventListener("change", ({target}) => {
      if (target.name === "x") {
        sessionStorage.setItem(KEPT, target.value);
        choose(target.value);
      } else {
        for (const spans of marks) if (spans.tags[0] === target.name) spans.visible = target.checked;
      }
    });
    const tokens = form.querySelector('input[value="tokens"]');
    if (!tokens.disabled && sessionStorage.getItem(KEPT) === "tokens") tokens.click();
  }
  document.body.dataset.drawn = plots.length;

  async function look() {  // for another version of the page of a run in progress
    try {
      const answer = await fetch("version", {cache: "no-store"});
      if (answer.ok && (await answer.text()) !== data.version) {
        location.reload();
        return;
      }
    } catch { /* the server is gone, or busy */ }
    setTimeout(look, 5000);
  }
  if (data.version) setTimeout(look, 5000);
})();
