module trivium/interop/amqp

go 1.18

require github.com/Azure/go-amqp v1.6.0
