// Prints tests/vectors/murmur2.json: keys and their hashes by the Kafka Java client.
// Run: java -cp kafka-clients-4.3.1.jar tests/vectors/Murmur2Vectors.java > tests/vectors/murmur2.json
import java.util.HexFormat;
import java.util.Random;
import org.apache.kafka.common.utils.Utils;

public class Murmur2Vectors {
    public static void main(String[] arguments) {
        Random random = new Random(20261121);
        StringBuilder out = new StringBuilder("[\n");
        for (int i = 0; i < 260; i++) {
            // Every length from 0 to 64 and some longer ones, with bytes of all values (Java's bytes are signed).
            byte[] key = new byte[i < 65 ? i : random.nextInt(300)];
            random.nextBytes(key);
            int hash = Utils.murmur2(key);
            out.append(String.format("{\"key\": \"%s\", \"murmur2\": %d, \"of_3\": %d, \"of_7\": %d}%s%n",
                HexFormat.of().formatHex(key), Integer.toUnsignedLong(hash),
                Utils.toPositive(hash) % 3, Utils.toPositive(hash) % 7, i < 259 ? "," : ""));
        }
        System.out.print(out.append("]\n"));
    }
}
