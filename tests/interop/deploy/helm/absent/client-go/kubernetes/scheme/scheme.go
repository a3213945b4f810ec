package scheme

import "k8s.io/apimachinery/pkg/runtime"

var Scheme = runtime.NewScheme()
