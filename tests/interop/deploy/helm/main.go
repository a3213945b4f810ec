// Renders a chart like `helm template`, with Helm's loader and engine: CHART VALUES.yaml...
// Prints one JSON object for each file of values, with the text of each template by its name.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

func main() {
	rendered := []map[string]string{}
	for _, file := range os.Args[2:] {
		one, err := render(os.Args[1], file)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", file, err)
			os.Exit(1)
		}
		rendered = append(rendered, one)
	}
	if err := json.NewEncoder(os.Stdout).Encode(rendered); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func render(directory, file string) (map[string]string, error) {
	chart, err := loader.Load(directory)
	if err != nil {
		return nil, err
	}
	given, err := chartutil.ReadValuesFile(file)
	if err != nil {
		return nil, err
	}
	release := chartutil.ReleaseOptions{Name: "trivium", Namespace: "gateways", Revision: 1, IsInstall: true}
	values, err := chartutil.ToRenderValues(chart, given, release, nil)
	if err != nil {
		return nil, err
	}
	return engine.Render(chart, values)
}
