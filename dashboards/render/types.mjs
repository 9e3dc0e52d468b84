// Type-check dashboards against the types that Grafana publishes.
//   node types.mjs NODE_MODULES DASHBOARD.json...
// Prints one JSON object: file -> list of complaints.
import { createRequire } from 'node:module';
import fs from 'node:fs';
import path from 'node:path';

const [modules, ...files] = process.argv.slice(2);
const ts = createRequire(path.join(modules, 'x.js'))('typescript');
const options = {
  noEmit: true,
  strict: true,
  skipLibCheck: true,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
  module: ts.ModuleKind.ESNext,
  target: ts.ScriptTarget.ES2022,
  types: [],
};

// `Written` turns enumerations into the values that JSON has. The published panel leaves `options` and `custom`
// open; those of the two kinds of panels that we use are closed by their own types.
const composable = path.join(modules, '@grafana/schema/dist/esm/raw/composable');
const head = `
import type { AnnotationQuery, Dashboard, FieldConfig, Panel, RowPanel } from '@grafana/schema';
import type { Options as StatOptions } from '${composable}/stat/panelcfg/x/StatPanelCfg_types.gen';
import type { FieldConfig as Lines, Options as LineOptions } from '${composable}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
type Written<T> = T extends string ? \`\${T}\` : T extends object ? { [K in keyof T]: Written<T[K]> } : T;
type Kind<T extends string, O, C> = Omit<Panel, 'type' | 'options' | 'fieldConfig'> & {
  type: T; options: O; fieldConfig: { defaults: Omit<FieldConfig, 'custom'> & { custom: C }; overrides: Panel['fieldConfig'] extends infer F ? F extends { overrides: infer R } ? R : never : never };
};
type PrometheusAnnotation = AnnotationQuery & { expr: string; step: string; titleFormat: string; textFormat: string };
type Ours = Omit<Dashboard, 'panels' | 'annotations'> & {
  annotations: { list: PrometheusAnnotation[] };
  panels: Array<RowPanel | Kind<'stat', StatOptions, {}> | Kind<'timeseries', LineOptions, Lines>>;
};
export const dashboard: Written<Ours> = `;
const headLines = head.split('\n').length - 1;

const sources = new Map();
for (const file of files) {
  // A name beside node_modules, so that imports are found; nothing is written there.
  const virtual = path.join(path.dirname(modules), `check_${sources.size}.ts`);
  sources.set(virtual, { file, text: `${head}${fs.readFileSync(file, 'utf8')};\n` });
}
const host = ts.createCompilerHost(options);
const { getSourceFile, fileExists, readFile } = host;
host.getSourceFile = (name, ...rest) =>
  sources.has(name) ? ts.createSourceFile(name, sources.get(name).text, options.target) : getSourceFile.call(host, name, ...rest);
host.fileExists = (name) => sources.has(name) || fileExists.call(host, name);
host.readFile = (name) => (sources.has(name) ? sources.get(name).text : readFile.call(host, name));

const found = Object.fromEntries(files.map((file) => [file, []]));
for (const diagnostic of ts.getPreEmitDiagnostics(ts.createProgram([...sources.keys()], options, host))) {
  const source = sources.get(diagnostic.file?.fileName ?? '');
  if (source) {
    const { line } = diagnostic.file.getLineAndCharacterOfPosition(diagnostic.start);
    const text = ts.flattenDiagnosticMessageText(diagnostic.messageText, ' ').slice(0, 600);
    found[source.file].push(`line ${line - headLines + 1}: ${text}`);
  }
}
console.log(JSON.stringify(found, null, 1));
